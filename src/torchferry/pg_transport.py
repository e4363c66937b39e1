"""PGTransport: one rank of a process group sends a whole state, other ranks receive it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchferry import compat
from torchferry.arguments import (
    Timeout,
    check_bool,
    check_choice,
    check_int,
    check_state_function,
    is_int,
    require,
    seconds,
)
from torchferry.core.compare import Extra
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.core.report import Report
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.engine.push.transfer import OptionsT
from torchferry.engine.workspace import Workspace
from torchferry.errors import BadArgument
from torchferry.links.process_group import ProcessGroupLink

# Names that torch's PGTransport has, and that the tests written for it import.
_StateDictMeta = compat.ContractStateMeta
_TensorMeta = compat.ContractTensorMeta
_cast_tensor = compat.cast_storage
_prepare_state_dict = compat.prepare_state
_prepare_tensor = compat.prepare_tensor


class PGTransport:
    """Sends a state from one rank of a process group to others, over that group.

    One side calls `send_checkpoint`, the other `recv_checkpoint`, with ranks **in that group**, which may
    differ from the global ranks. There are no acknowledgements. When `send_checkpoint` returns, the backend
    has the bytes; a receiver may still fail or reject them.

    Args:
        pg: a ProcessGroup, or an object with its `send`, `recv` and `rank`.
        timeout: the time limit of a whole transfer; a timedelta, or seconds.
        device: the device that the group's backend works on; a torch.device or its name.
        state_dict: a function that returns the local state. If given, every receive calls it and writes into
            its tensors, and the received state holds those tensors. Values that are not tensors (a step
            count, a learning rate) are only in the returned state: load that. Without `state_dict`, received
            tensors are fresh and on the CPU.
        strict: with `state_dict`, whether both sides must have the same paths. If False, paths that only the
            local state has keep their values, and paths that only the peer has are dropped, unless `extra`
            says otherwise. `last_report` lists them, and one WARNING names the first few. If the states have
            no path in common, the receive raises StateMismatch.
        extra: with `state_dict`, what to do with paths that only the peer has: "error" (the default if
            `strict`), "drop" (the default if not), or "fresh": they are in the returned state as fresh
            tensors on the CPU. Use "fresh" for a new worker whose optimizer has no moments yet, and load the
            state that `recv_checkpoint` returns.
        stall_timeout: give up on a peer when no message to or from it completes for this long; None for
            never. A receiver counts from the sender's first message.
        verify: check every received byte against a digest of what the sender read. If it is off on the
            sender, receivers have nothing to check. If it is off on a receiver, that receiver does not check.
        allow_pickle: pickle values that torchferry can't encode; needed on both sides. A pickle can
            run any code, so use it only between peers that trust each other.
        mesh: the DeviceMesh of fresh DTensors. It must have the shape of the sender's mesh, or a slice with
            the same names and shape, and this rank must have the shard's coordinates in it.
        max_metadata_bytes: the longest metadata that is sent or accepted. Decoded metadata takes about eleven
            times as much memory, and up to sixty times if a malicious peer made it.
        relay: whether receivers forward the state to each other, in the order of `dst_ranks`, so that the
            sender's network link carries it once. If one receiver fails, all later ones fail too. When
            `send_checkpoint` returns, the backend has the bytes for the first receiver. Only the sender's
            setting matters.
        same_host: whether a large state goes through memory to receivers on this machine that run as the same
            user, instead of over the group. Needs gloo, and True on both sides; `relay` excludes it. The
            sender offers it, the receiver takes or declines it, and `last_report.via` says what was used.
            With an offer, a receiver that rejects the state does not get its bytes. Failures are the same
            either way, and break the group either way.
        copy_up_to: copy tensors of up to this many bytes before they are sent, so that these may change
            meanwhile. Tensors that share memory with a larger one are not copied.

    Raises:
        BadArgument: an argument is invalid.

    After a transfer, `last_report` says how much was moved and how long it took. After a failed one it is
    None.
    """

    def __init__(
        self,
        pg: Any,
        timeout: Timeout,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        *,
        strict: bool = True,
        extra: Extra | None = None,
        stall_timeout: Timeout | None = None,
        verify: bool = True,
        allow_pickle: bool = False,
        mesh: DeviceMesh | None = None,
        max_metadata_bytes: int = MAX_METADATA_BYTES,
        relay: bool = False,
        same_host: bool = True,
        copy_up_to: int = 0,
    ) -> None:
        _check_group(pg)
        check_state_function(state_dict)
        flags = {"strict": strict, "verify": verify, "allow_pickle": allow_pickle, "relay": relay}
        for name, flag in {**flags, "same_host": same_host}.items():
            check_bool(flag, name)
        if extra is not None:
            check_choice(extra, "extra", get_args(Extra))
        is_count = is_int(max_metadata_bytes) and max_metadata_bytes > 0
        require(is_count, "max_metadata_bytes", "a positive number of bytes", max_metadata_bytes)
        both: dict[str, Any] = {
            "timeout_s": seconds(timeout, "timeout"),
            "max_metadata_bytes": max_metadata_bytes,
            "stall_s": None if stall_timeout is None else seconds(stall_timeout, "stall_timeout"),
            "verify": verify,
            "allow_pickle": allow_pickle,
            "same_host": same_host,
        }
        self.last_report: Report | None = None
        self._link = ProcessGroupLink(pg, _check_device(device))
        self._workspace = Workspace(self._link.device)
        self._send_options = SendOptions(
            **both,
            relay=relay,
            copy_up_to=check_int(copy_up_to, "copy_up_to", low=0),
            question="Is rank {peer} in recv_checkpoint, on the same group?",
        )
        self._receive_options = ReceiveOptions(
            **both,
            local_state=state_dict,
            strict=strict,
            extra=extra,
            mesh=mesh,
            question="Is rank {peer} in send_checkpoint, with this rank in dst_ranks, on the same group?",
        )

    def send_checkpoint(
        self,
        dst_ranks: Sequence[int],
        state_dict: object,
        step: int | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> None:
        """Send a state to the given ranks of the group.

        The state must not change until this returns. `step` is sent along, for receivers that ask for one.
        `timeout` replaces that of the transport.

        Each call matches one `recv_checkpoint` on each receiver. If the call raises Unsendable, the matching
        receive raises PeerGaveUp with the reason. A receiver that passes `step` ignores refusals for other
        steps.

        Raises:
            BadArgument: a rank is not another member of the group (also a ValueError).
            Unsendable: something in the state can't be sent; receivers raise PeerGaveUp.
            StateChanged: the state changed meanwhile; receivers reject inconsistent data.
            LinkTimeout: it took longer than the timeout (also a TimeoutError).
            LinkBroken: the receiver is gone (also a ConnectionError).
            SendFailed: there are several receivers, and one or more failed; lists the sends that completed.
            StateError: memory of the state was freed meanwhile.
            GroupBroken: an earlier transfer failed on this group: create a new group.
        """
        self.last_report = None
        is_list = not isinstance(dst_ranks, (str, bytes)) and isinstance(dst_ranks, Iterable)
        require(is_list, "dst_ranks", "a list of ranks", dst_ranks)
        peers = [self._check_peer(rank) for rank in dst_ranks]
        if len(set(peers)) != len(peers):
            raise BadArgument(f"dst_ranks {peers} lists a rank twice")
        options = _for_call(self._send_options, step, timeout)
        self.last_report = send_state(self._link, peers, state_dict, options, self._workspace)

    def recv_checkpoint(
        self, src_rank: int, step: int | None = None, *, timeout: Timeout | None = None
    ) -> object:
        """Receive the state that the given rank of the group sends, and return it.

        With `step`, the sender must have sent that step. `timeout` replaces that of the transport.

        Raises:
            BadArgument: the rank is not another member of the group (also a ValueError).
            StateMismatch: the state does not fit the local one; nothing was overwritten.
            StepMismatch: the state belongs to another step; nothing was overwritten.
            PeerError: what the sender sent can't be used, or it aborted; nothing was overwritten.
            LinkTimeout: it took longer than the timeout (also a TimeoutError).
            LinkBroken: the sender is gone (also a ConnectionError).
            Corrupted: the received bytes differ from the sent bytes.
            StateError: there is not enough memory, or memory of the local state was freed meanwhile.
            TargetTorn: one of these after local tensors were written; lists which.
            GroupBroken: an earlier transfer failed on this group: create a new group.
        """
        self.last_report = None
        peer, options = self._check_peer(src_rank), _for_call(self._receive_options, step, timeout)
        state, self.last_report = receive_state(self._link, peer, options, self._workspace)
        return state

    def _check_peer(self, rank: int) -> int:
        require(is_int(rank), "a rank", "an int", rank)
        own, size = self._link.rank, self._link.size
        if rank < 0 or (size is not None and rank >= size):
            ranks = "" if size is None else f", which has ranks 0 to {size - 1}"
            raise BadArgument(
                f"rank {rank} is not in the group{ranks}. These are ranks in the group given to PGTransport; "
                "torch.distributed.get_group_rank converts global ranks"
            )
        if rank == own:
            raise BadArgument(f"rank {rank} is this process itself: pass another rank")
        return rank


def _for_call(options: OptionsT, step: int | None, timeout: Timeout | None) -> OptionsT:
    """Return the options of one transfer, which may have a timeout of its own."""
    timeout_s = options.timeout_s if timeout is None else seconds(timeout, "timeout")
    return replace(options, step=None if step is None else check_int(step, "step"), timeout_s=timeout_s)


def _check_group(pg: Any) -> None:
    if pg is None:
        raise BadArgument("pg is None: call torch.distributed.init_process_group first")
    if isinstance(pg, int) and pg == dist.GroupMember.NON_GROUP_MEMBER:
        raise BadArgument(
            "this process is not a member of the group: torch.distributed.new_group returned "
            "GroupMember.NON_GROUP_MEMBER. Only members can send and receive on the group"
        )
    is_group = callable(getattr(pg, "send", None)) and callable(getattr(pg, "recv", None))
    require(is_group, "pg", "a process group", pg)


def _check_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        module = torch.get_device_module(found)
    except (RuntimeError, TypeError) as error:
        raise BadArgument(f"device must be a torch.device or its name: {error}") from None
    if hasattr(module, "is_available") and not module.is_available():
        raise BadArgument(
            f"there is no {found.type} on this machine: device must be the one the backend works on"
        )
    return found
