"""fetch: fetch a state by address, from any source that has it."""

import os
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from torch.distributed.device_mesh import DeviceMesh

from torchferry import arguments
from torchferry.arguments import Timeout
from torchferry.core.compare import Extra
from torchferry.core.pull import LeaseRequest
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine.pull.caller import ProgressEvent
from torchferry.engine.pull.fetch import Fetched, FetchOptions, fetch_state
from torchferry.engine.pull.remote import Via
from torchferry.engine.pull.reshare import Resharing
from torchferry.engine.workspace import Workspace
from torchferry.errors import BadArgument
from torchferry.links.address import parse_address
from torchferry.serving import Source
from torchferry.tensors.kinds import RebuildContext
from torchferry.tensors.memory import CPU


def fetch(
    addresses: str | Sequence[str],
    into: Any = None,
    *,
    name: str = "state",
    version: int | None = None,
    newer_than: int | None = None,
    timeout: Timeout = 300.0,
    stall_timeout: Timeout | None = None,
    verify: bool = True,
    strict: bool = True,
    atomic: bool = False,
    extra: Extra = "error",
    compare: bool | Literal["auto"] = "auto",
    via: Via | None = None,
    tls: ssl.SSLContext | None = None,
    max_metadata_bytes: int = MAX_METADATA_BYTES,
    on_progress: Callable[[ProgressEvent], object] | None = None,
    reshare: bool | Source = False,
    linger: Timeout = 10.0,
    mesh: DeviceMesh | None = None,
) -> Fetched:
    """Fetch a state from one or several sources, and return it with its version and a report.

    The states are compared before any chunk is requested, and every chunk is verified. All sources that serve
    the same state deliver chunks. If one dies, only its unfinished chunks are requested again, from another.
    Before this returns, it confirms to the sources that this process has the version: `report.confirmed`.

    Args:
        addresses: the `address` of a source, or several of them.
        into: a state, or a function that returns one. Its tensors are written in place. Objects in it with
            `state_dict` and `load_state_dict` are loaded, and are in the returned state. All of them except
            modules take what the source has, whatever `strict` and `extra` say. Other values that are not
            tensors are only in the returned state. Without `into`, tensors are fresh and on the CPU.
        name: which of a source's states.
        version: fetch exactly this version.
        newer_than: wait for a version above this one, up to `timeout`. The transfer then has `timeout` again,
            unless `version` is given too: then both share it.
        timeout: the time limit; a timedelta, or seconds.
        stall_timeout: fail with LinkStalled when no byte arrives for this long; None for never.
        verify: check every byte against the digest that was computed when the version was published. If
            False, changes of a state that is served live are found by torch's version counters only.
        strict: with `into`, whether both sides must have the same paths. If False, paths that only the local
            state has keep their values.
        atomic: with `into`, receive into separate memory, and write when everything is verified. A failure
            then leaves the state as it was. This needs as much extra memory as the bytes that are fetched.
            With objects, it also needs a copy of the local state, to restore it if an object can't be loaded.
        extra: with `into`, what to do with paths that only the source has: "error", "drop", or "fresh".
        compare: hash what `into` holds, and fetch only chunks that differ. "auto" hashes only tensors that an
            earlier fetch wrote. A tensor that torch has written since is hashed only until four chunks in a
            row differ; the rest of it is fetched.
        via: how bytes travel: "tcp"; "memory", for sources on the same machine and of the same user; or None
            for memory where that is possible, and TCP elsewhere.
        tls: a context for https: which certificates to trust, and a client certificate.
        max_metadata_bytes: the longest metadata that is accepted.
        on_progress: called with a ProgressEvent for every 8 MiB, and at least ten times a second, except
            while your own code runs (`into`, `state_dict`, `load_state_dict`). If it raises, the fetch ends
            with that exception. With `atomic`, it is not called any more when the verified state is being
            written, because it must not end the fetch then. Ctrl-C takes effect after the write.
        reshare: serve verified chunks to other receivers that reshare, and fetch from these where possible.
            The source then sends the state about once in total. With True, this process listens on the
            interface through which it reached the source. With a Source, chunks are served at its port. Over
            https, pass a Source: it has the certificate.
        linger: with `reshare`, how long to serve receivers that still take chunks after this has returned.
        mesh: the DeviceMesh of DTensors that are created fresh.

    Raises:
        BadArgument: an argument is invalid.
        StateMismatch: the state does not fit `into`; none of its bytes was requested.
        NoSuchVersion: no source has the name or the version (also a LookupError).
        NotAuthorized: the token is wrong or missing (also a PermissionError).
        SourcesLost: no source can be reached, or all died; says why for each (also a ConnectionError).
        LinkTimeout: the timeout or `stall_timeout` passed (also a TimeoutError).
        Corrupted: every source delivered damaged bytes repeatedly.
        PeerError: what a source sent can't be used, or its state changed.
        TargetTorn: one of these happened after local tensors were written. It is the cause; lists the paths.
        StateError: there is not enough memory; or with `atomic`, the `load_state_dict` of an object raised.
    """
    given: Any = [addresses] if isinstance(addresses, str) else addresses
    # The message does not show the value, which may contain tokens.
    if not isinstance(given, Iterable) or isinstance(given, bytes) or not (given := list(given)):
        raise BadArgument("addresses must be an address, or a list of at least one")
    found = list(dict.fromkeys(map(parse_address, given)))
    arguments.check_name(name)
    if version is not None:
        version = arguments.check_int(version, "version")
    if newer_than is not None:
        newer_than = arguments.check_int(newer_than, "newer_than")
    arguments.check_choice(compare, "compare", (True, False, "auto"))
    arguments.check_choice(extra, "extra", get_args(Extra))
    arguments.check_choice(via, "via", (None, *get_args(Via)))
    arguments.check_tls(tls)
    insecure = [str(address) for address in found if tls is not None and not address.secure]
    if insecure:
        raise BadArgument(f"tls is given, but the address of {insecure[0]} begins with http://, not https://")
    arguments.require(on_progress is None or callable(on_progress), "on_progress", "a function", on_progress)
    arguments.require(isinstance(reshare, (bool, Source)), "reshare", "True, False or a Source", reshare)
    if reshare is True and any(address.secure for address in found):
        raise BadArgument("with TLS, reshare must be a Source, which has a certificate")
    if reshare and not verify:
        raise BadArgument("reshare needs verify=True: what another receiver delivers must be checked")
    options = FetchOptions(
        wanted=LeaseRequest(name, f"{socket.gethostname()}:{os.getpid()}", version, newer_than),
        timeout_s=arguments.seconds(timeout, "timeout"),
        max_metadata_bytes=arguments.check_int(max_metadata_bytes, "max_metadata_bytes", low=1),
        local_state=arguments.state_function(into),
        strict=arguments.check_bool(strict, "strict"),
        extra=extra,
        compare=compare,
        atomic=arguments.check_bool(atomic, "atomic"),
        verify=arguments.check_bool(verify, "verify"),
        stall_s=None if stall_timeout is None else arguments.seconds(stall_timeout, "stall_timeout"),
        via=via,
        reshare=reshare.resharing() if isinstance(reshare, Source) else Resharing() if reshare else None,
        linger_s=arguments.seconds(linger, "linger"),
        tls=tls,
        context=RebuildContext(mesh=mesh),
        on_progress=on_progress,
    )
    return fetch_state(found, options, _workspace(os.getpid()))


@lru_cache(maxsize=1)
def _workspace(pid: int) -> Workspace:
    """Return the workspace of all fetches of a process. A forked child gets its own: locks may be held."""
    return Workspace(CPU)
