"""PGTransport: a whole state over a process group, pushed by one side and taken by the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchferry.core.compare import Extra
from torchferry.core.protocol import MAX_METADATA_BYTES
from torchferry.core.report import Report
from torchferry.engine import Pull, Push, group_of, pull, push
from torchferry.errors import BadArgument
from torchferry.links.process_group import ProcessGroupLink, is_lasting, rank_in, size_of
from torchferry.pg_transport.pickled import decode_any, dump_leaf, load_leaf
from torchferry.tensors.kinds import RebuildContext
from torchferry.torch_internals import backend_of


class PGTransport:
    """Sends a state from one rank of a process group to others, over that group and nothing else.

    One side calls `send_checkpoint`, the other `recv_checkpoint`, with ranks **in that group**, which are
    not always the global ones. The receiver does not answer, so a send that returns says that the group
    took every byte, not that the peer has them.

    Args:
        pg: a ProcessGroup, or anything with its `send`, `recv` and `rank`.
        timeout: for a whole transfer; a timedelta, or seconds.
        device: what the group's backend works on; a torch.device or its name.
        state_dict: if given, it is called at each receive, and what arrives is written into the tensors
            of the state that it returns; the received state holds those very tensors. What is not a tensor
            (a step count, a learning rate) is only in the state that is returned: load that. Without
            `state_dict`, received tensors are fresh and on the CPU.
        strict: with `state_dict`, whether both sides must have the same paths. If not, those that only this
            side has are left alone, and those that only the peer has are dropped, unless `extra` says
            otherwise; the received state is this side's own with all that matched in it. What was dropped and
            kept is in `last_report` and in one WARNING. If nothing matches at all, it is a StateMismatch.
        extra: with `state_dict`, what to do with paths that only the peer has: "error" (as with `strict`),
            "drop" (as without), or "fresh": what matches is written, and the rest is in the received state as
            fresh tensors on the CPU. That is for a new worker whose optimizer has no moments yet: load what
            `recv_checkpoint` returns.
        stall_timeout: give up a peer when no message to or from it completes for so long; none by default. A
            receiver counts from the sender's first message on: waiting for it to begin is no stall.
        verify: check every byte that arrives against a digest of what the sender read. Switching it off on
            the sender leaves nothing to check, on the receiver only saves it the work.
        allow_pickle: let values outside the closed set travel pickled; needed on both sides. A pickle can
            run anything, so only for peers that are trusted as much as oneself.
        mesh: the DeviceMesh of fresh DTensors. The sender's mesh must have its shape, or the names and shape
            of a slice of it, and the shard this rank's coordinates along every dimension that splits the
            tensor.
        max_metadata_bytes: the most metadata that is sent or accepted. Decoded it takes more: some eleven
            times its length, and up to sixty times if a peer makes it for that.
        relay: whether receivers forward the state to each other, in the order of `dst_ranks`, so that the
            sender's network link carries it once. If one receiver fails, all later ones fail too. When
            `send_checkpoint` returns, the backend has the bytes for the first receiver. Only the sender's
            setting matters.

    Raises:
        BadArgument: no group, a timeout that is not positive, no such device, no function for the state, or
            something other than a bool for what is one.

    After a transfer, `last_report` says how much was moved and how long it took; None after one that failed.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta | float,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        *,
        strict: bool = True,
        extra: Extra | None = None,
        stall_timeout: timedelta | float | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        mesh: DeviceMesh | None = None,
        max_metadata_bytes: int = MAX_METADATA_BYTES,
        relay: bool = False,
    ) -> None:
        self.last_report: Report | None = None
        self._pg = _group(pg)
        self._timeout_s = _seconds(timeout, "timeout")
        self._stall_s = None if stall_timeout is None else _seconds(stall_timeout, "stall_timeout")
        self._verify = _flag(verify, "verify")
        device = _device(device)
        within = partial(backend_of, device=device)
        self._group = group_of(pg, within=within, lasting=is_lasting(pg))
        self._link = ProcessGroupLink(pg, device)
        self._state_dict = _state_function(state_dict)
        self._strict = _flag(strict, "strict")
        self._extra = _extra(extra)
        self._relay = _flag(relay, "relay")
        self._max_metadata_bytes = _most_bytes(max_metadata_bytes)
        self._pickle = dump_leaf if _flag(allow_pickle, "allow_pickle") else None
        self._site = RebuildContext(mesh=mesh, unpickle=load_leaf if allow_pickle else None)
        self._decode = partial(decode_any, allow_pickle=allow_pickle)

    def send_checkpoint(self, dst_ranks: Sequence[int], state_dict: object, step: int | None = None) -> None:
        """Send a state to the given ranks of the group.

        Returns once the group has taken every byte; until then the state must not change. With `relay`, those
        are the bytes for the first receiver. `step` travels along, for receivers that ask for one.

        Each call matches one `recv_checkpoint` on each receiver. If the call raises Unsendable, the matching
        receive raises PeerGaveUp with the reason. A receiver that passes `step` ignores refusals of other
        steps.

        Raises:
            BadArgument: a rank that is not another member of the group (also a ValueError).
            Unsendable: something in the state can't travel; the receivers are told, with PeerGaveUp.
            StateChanged: the state was changed meanwhile; no receiver accepts a mixture.
            LinkTimeout: it took longer than the timeout (also a TimeoutError).
            LinkBroken: the receiver is gone (also a ConnectionError).
            SendFailed: one of these for some of several receivers; says who got it and who did not.
            StateError: memory of the state was freed meanwhile.
            GroupBroken: an earlier transfer failed on this group, which must be rebuilt.
        """
        self.last_report = None
        if isinstance(dst_ranks, (str, bytes)) or not isinstance(dst_ranks, Iterable):
            raise BadArgument(f"dst_ranks is a list of ranks, not {dst_ranks!r}")
        peers = [self._peer(rank) for rank in dst_ranks]
        if len(set(peers)) != len(peers):
            raise BadArgument(f"dst_ranks {peers} names a rank twice")
        terms = Push(
            self._timeout_s,
            self._max_metadata_bytes,
            step=_step(step),
            rank=rank_in(self._pg) or 0,
            relay=self._relay,
            pickle=self._pickle,
            stall_s=self._stall_s,
            verify=self._verify,
            if_unmet="Is rank {peer} in recv_checkpoint, on the same group?",
        )
        self.last_report = push(self._link, peers, state_dict, terms, self._group)

    def recv_checkpoint(self, src_rank: int, step: int | None = None) -> object:
        """Receive the state that the given rank of the group sends, and return it.

        With `step`, the sender must have sent that very step.

        Raises:
            BadArgument: a rank that is not another member of the group (also a ValueError).
            StateMismatch: it does not fit the local state; nothing was overwritten.
            StepMismatch: it is of another step; nothing was overwritten.
            PeerError: what the sender sent can't be used, or it gave up; nothing was overwritten.
            LinkTimeout: it took longer than the timeout (also a TimeoutError).
            LinkBroken: the sender is gone (also a ConnectionError).
            Corrupted: bytes arrived that are not those that were sent.
            StateError: there is not enough memory, or some of the local state's was freed meanwhile.
            TargetTorn: any of these after local tensors were written; says which.
            GroupBroken: an earlier transfer failed on this group, which must be rebuilt.
        """
        self.last_report = None
        size = size_of(self._pg)
        terms = Pull(
            self._timeout_s,
            self._max_metadata_bytes,
            step=_step(step),
            rank=rank_in(self._pg),
            members=None if size is None else range(size),
            target=self._state_dict,
            strict=self._strict,
            extra=self._extra,
            site=self._site,
            decode=self._decode,
            stall_s=self._stall_s,
            verify=self._verify,
            if_unmet="Is rank {peer} in send_checkpoint, with this rank in dst_ranks, on the same group?",
        )
        state, self.last_report = pull(self._link, self._peer(src_rank), terms, self._group)
        return state

    def _peer(self, rank: int) -> int:
        """Check a rank as far as the group lets it be checked."""
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise BadArgument(f"a rank is an int, not {rank!r}")
        own, size = rank_in(self._pg), size_of(self._pg)
        if size is not None and not 0 <= rank < size:
            raise BadArgument(
                f"rank {rank} is not in the group, which has ranks 0 to {size - 1}. These are ranks in "
                "the group given to PGTransport; torch.distributed.get_group_rank translates global ones"
            )
        if rank < 0:
            raise BadArgument(f"rank {rank} is not in the group")
        if rank == own:
            raise BadArgument(f"rank {rank} is this process itself: a transfer needs two")
        return rank


def _group(pg: Any) -> Any:
    if pg is None:
        raise BadArgument(
            "no process group: torch.distributed.group.WORLD is None before init_process_group was called"
        )
    if isinstance(pg, int) and pg == dist.GroupMember.NON_GROUP_MEMBER:
        raise BadArgument(
            "this process is not a member of the group: torch.distributed.new_group gives such a process "
            "GroupMember.NON_GROUP_MEMBER instead of a group. Only its members can send and receive on it"
        )
    if not (callable(getattr(pg, "send", None)) and callable(getattr(pg, "recv", None))):
        raise BadArgument(f"pg must be a process group, not {pg!r}")
    return pg


def _state_function(state_dict: Any) -> Callable[[], object] | None:
    # A module can be called, too, but that is its forward pass.
    if state_dict is not None and (not callable(state_dict) or isinstance(state_dict, torch.nn.Module)):
        raise BadArgument(
            f"state_dict must be a function that returns the local state, not a {type(state_dict).__name__}: "
            "pass model.state_dict, not model.state_dict() or the model"
        )
    return state_dict


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadArgument(f"{name} must be True or False, not {value!r}")
    return value


def _extra(extra: Any) -> Extra | None:
    if extra not in (None, *get_args(Extra)):
        choices = ", ".join(f'"{choice}"' for choice in get_args(Extra))
        raise BadArgument(f"extra must be one of {choices}, not {extra!r}")
    return extra  # type: ignore[no-any-return]


def _most_bytes(nbytes: Any) -> int:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise BadArgument(f"max_metadata_bytes must be a number of bytes, not {nbytes!r}")
    return nbytes


def _seconds(timeout: timedelta | float, name: str) -> float:
    try:
        if isinstance(timeout, (bool, str, bytes)):
            raise TypeError
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        raise BadArgument(f"{name} must be a timedelta or a number of seconds, not {timeout!r}") from None
    if not 0 < seconds <= timedelta.max.total_seconds():
        raise BadArgument(f"{name} must be above 0 and finite, not {timeout!r}: nothing waits for ever")
    return seconds


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        module = torch.get_device_module(found)
    except (RuntimeError, TypeError) as error:
        raise BadArgument(f"device must be a torch.device or its name: {error}") from None
    if hasattr(module, "is_available") and not module.is_available():
        raise BadArgument(f"there is no {found.type} here: device is what the group's backend works on")
    return found


def _step(step: int | None) -> int | None:
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise BadArgument(f"step must be an int, not {step!r}")
    if step is not None and not -(2**63) <= step < 2**63:
        raise BadArgument(f"step {step} does not fit in 64 bits")
    return step
