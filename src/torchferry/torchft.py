"""Checkpoint transports for torchft's Manager: on serve and fetch, and on a process group.

Nothing imports this module but the user. It works without torchft: its Manager only calls the methods of a
`CheckpointTransport`.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import GenericAlias
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchferry import arguments, pg_transport
from torchferry.arguments import Timeout
from torchferry.core.report import FetchReport, Report
from torchferry.core.text import show_error
from torchferry.errors import CheckpointTimeout, FerryError, NotAuthorized, ReadersRemain
from torchferry.fetching import fetch
from torchferry.links.address import own_host
from torchferry.links.process_group import timeout_in
from torchferry.serving import Source

logger = logging.getLogger(__name__)

COPIED_BYTES = 1 << 20
"""Tensors of up to this size are copied when they are sent. A forward pass changes those of BatchNorm."""

_DROP_S = 5.0
"""How long connections of readers that were dropped may take to close."""


class Transport:
    """Heals replicas by address: a source serves its state until nobody reads it, a replica fetches it.

    Pass it as `checkpoint_transport=` to `torchft.Manager`, which calls the methods. No process group is used
    and no pickle. The state is served where it is, without a copy, except for small tensors.

    Args:
        timeout: how long `disallow_checkpoint` waits for readers, and the time limit of a receive that is
            not given another one; a timedelta, or seconds.
        state_dict: a function that returns the local state, in the form in which the Manager sends it:
            {"user": {"default": …}}. If given, a receive writes to its tensors. Paths that it lacks are
            fresh. Since a receive runs on the Manager's quorum thread, use it with `use_async_quorum=False`,
            or return spare tensors: autograd may hold those of the model.
        snapshot: copy the whole state at every send. DiLoCo and LocalSGD need it, because they step the
            optimizer while others read.
        host: the address, host name or interface to listen on. By default the interface in
            GLOO_SOCKET_IFNAME, or else this machine's address towards the lighthouse (TORCHFT_LIGHTHOUSE) or
            towards MASTER_ADDR, or else loopback.
        port: the port; 0 for any that is free.
        advertise: the host, or HOST:PORT, that `metadata` names instead.
        token: what receivers must know, the same in all replicas; by default TORCHFERRY_TOKEN. Without
            either, it is random, and a part of `metadata`, which torchft logs and gives to every replica.
        sources: `metadata` of other transports, which a receive asks as well.
        mesh: the DeviceMesh of fresh DTensors, as for `torchferry.PGTransport`.

    Raises:
        BadArgument: an argument is invalid, or nothing can listen there.

    After a receive, `last_report` says what was moved.
    """

    # torchft's transports are generic: PGTransport[dict[str, object]](…).
    __class_getitem__: Any = classmethod(GenericAlias)

    def __init__(
        self,
        timeout: Timeout,
        state_dict: Callable[[], object] | None = None,
        *,
        snapshot: bool = False,
        host: str | None = None,
        port: int = 0,
        advertise: str | None = None,
        token: str | None = None,
        sources: Sequence[str] = (),
        mesh: DeviceMesh | None = None,
    ) -> None:
        self._timeout_s = arguments.seconds(timeout, "timeout")
        arguments.check_state_function(state_dict)
        arguments.require(not isinstance(sources, str), "sources", "a list of strings", "one string")
        self._state_dict, self._mesh = state_dict, mesh
        self._snapshot = arguments.check_bool(snapshot, "snapshot")
        self._token = os.environ.get("TORCHFERRY_TOKEN") or None if token is None else token
        if host is None:
            host = own_host(os.environ.get("TORCHFT_LIGHTHOUSE"), os.environ.get("MASTER_ADDR"))
        self._source = Source(host, port, advertise=advertise, token=self._token)
        self._sources = [source for source in sources if source != self.metadata()]
        self._sending = threading.Lock()
        self.last_report: FetchReport | None = None

    def metadata(self) -> str:
        """Return the address that `recv_checkpoint` of other replicas needs. See `token`."""
        address = self._source.address
        return address if self._token is None else address.partition("#")[0]

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: object, timeout: Timeout | None = None
    ) -> None:
        """Serve a state as that of a step, until `disallow_checkpoint`. Returns before anyone has read it.

        If this raises, receivers of the step raise too, at once, with the reason.
        The state must not change until then, except for tensors of up to 1 MiB. A change is found, and fails
        the readers.

        Raises:
            BadArgument: an argument is invalid, or the transport was shut down.
            Unsendable: something in the state can't be sent.
            StateChanged: the state changed meanwhile.
            StateError: there is no memory for a copy.
        """
        step = arguments.check_int(step, "step")
        with self._sending:
            # The step may be sent again, or a lower one.
            self._withdraw(self._limit_s(timeout))
            try:
                self._source.publish(state_dict, step, snapshot=self._snapshot, copy_up_to=COPIED_BYTES)
            except Exception as error:
                self._source.give_up(step, f"the source can't send step {step}: {show_error(error)}")
                raise

    def disallow_checkpoint(self) -> None:
        """Stop serving, and return when nobody reads the state any more. It may change then.

        Readers that do not finish within the timeout are disconnected, and a WARNING names them.
        """
        with self._sending:
            self._withdraw(self._timeout_s)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Timeout | None = None) -> Any:
        """Fetch the state of a step, and return it. Waits until the source serves that step.

        `metadata` may be that of several transports, separated by spaces. All that serve the same state
        deliver parts of it.

        Raises:
            CheckpointTimeout: it took longer than the timeout (also a TimeoutError and a RuntimeError).
            PeerGaveUp: the source can't send the state, or the state changed; says why.
            FerryError: as `torchferry.fetch`.
        """
        self.last_report = None
        step = arguments.check_int(step, "step", low=1 - 2**63)
        addresses = [self._with_token(each) for each in (*metadata.split(), *self._sources)]
        with _timeouts_are_runtime_errors():
            got = fetch(
                addresses,
                self._state_dict,
                version=step,
                newer_than=step - 1,
                timeout=self._limit_s(timeout),
                strict=False,
                extra="fresh",
                mesh=self._mesh,
            )
        self.last_report = got.report
        return got.state

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving for good. Readers may finish within the timeout if `wait`, and are disconnected."""
        self._source.close(self._timeout_s if wait else 0.001)

    def _withdraw(self, timeout_s: float) -> None:
        try:
            self._source.withdraw(timeout=timeout_s)
        except ReadersRemain as error:
            logger.warning("readers are disconnected after %g s: %s", timeout_s, error)
            try:
                self._source.withdraw(timeout=_DROP_S, readers="drop")
            except ReadersRemain as again:
                logger.warning("connections of readers did not close within %g s: %s", _DROP_S, again)

    def _limit_s(self, timeout: Timeout | None) -> float:
        return arguments.seconds(timeout, "timeout") if timeout else self._timeout_s

    def _with_token(self, address: str) -> str:
        if "#" in address:
            return address
        if self._token is None:
            raise NotAuthorized(
                f"the metadata {address} has no token, because its transport was given one: set "
                "TORCHFERRY_TOKEN, or pass token=, in all replicas"
            )
        return f"{address}#{self._token}"


class PGTransport:
    """Heals replicas over torchft's process group: a drop-in for `torchft.checkpointing.PGTransport`.

    The group may be reconfigured at any time, by the Manager. Ranks are those in the group behind torchft's
    wrappers.

    Args:
        pg: the process group that the Manager reconfigures.
        timeout: the time limit of a whole transfer that is not given another one; a timedelta, or seconds.
            Zero, here or there, is the group's own timeout.
        device: the device that the group's backend works on.
        state_dict: as for `Transport`.
        options: further arguments of `torchferry.PGTransport`.

    Raises:
        BadArgument: an argument is invalid.
    """

    # torchft's transports are generic: PGTransport[dict[str, object]](…).
    __class_getitem__: Any = classmethod(GenericAlias)

    def __init__(
        self,
        pg: Any,
        timeout: Timeout,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        defaults = {"strict": False, "extra": "fresh", "copy_up_to": COPIED_BYTES}
        self._pg, self._timeout, self._device = pg, timeout, torch.device(device)
        self._transport = pg_transport.PGTransport(
            pg, timeout or timedelta.max, device, state_dict, **{**defaults, **options}
        )

    @property
    def last_report(self) -> Report | None:
        """How much the last transfer moved, and how long it took; None if it failed."""
        return self._transport.last_report

    def metadata(self) -> str:
        """Return a constant: the group is all that a receiver needs."""
        return "<n/a>"

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: object, timeout: Timeout | None = None
    ) -> None:
        """Send a state to ranks of the group. It may change when this returns.

        Raises:
            CheckpointTimeout: it took longer than the timeout (also a TimeoutError and a RuntimeError).
            FerryError: as `torchferry.PGTransport.send_checkpoint`.
        """
        with _timeouts_are_runtime_errors():
            self._transport.send_checkpoint(dst_ranks, state_dict, step, timeout=self._limit(timeout))

    def disallow_checkpoint(self) -> None:
        """Do nothing: no state is read after `send_checkpoint`."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: Timeout | None = None) -> Any:
        """Receive the state of a step from a rank of the group, and return it.

        Raises:
            CheckpointTimeout: it took longer than the timeout (also a TimeoutError and a RuntimeError).
            FerryError: as `torchferry.PGTransport.recv_checkpoint`.
        """
        with _timeouts_are_runtime_errors():
            return self._transport.recv_checkpoint(src_rank, step, timeout=self._limit(timeout))

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: the group belongs to the Manager."""

    def _limit(self, timeout: Timeout | None) -> Timeout:
        found = self._timeout if timeout is None else timeout
        return found or timeout_in(self._pg, self._device) or self._timeout or timedelta.max


@contextmanager
def _timeouts_are_runtime_errors() -> Iterator[None]:
    """Raise CheckpointTimeout for every timeout: torchft expects a RuntimeError that says "timed out"."""
    try:
        yield
    except TimeoutError as error:
        if not isinstance(error, FerryError):
            raise
        raise CheckpointTimeout(
            f"timed out: {error.what}", peer=error.peer, path=error.path, phase=error.phase
        ) from error


with suppress(ImportError):
    from torchft.checkpointing.transport import CheckpointTransport

    CheckpointTransport.register(Transport)
    CheckpointTransport.register(PGTransport)
