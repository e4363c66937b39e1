"""serve and Source: serve states, which other processes fetch by address."""

import secrets
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, get_args

from torchferry import arguments
from torchferry.arguments import Timeout
from torchferry.core.leases import Reader
from torchferry.engine.deadlines import left_s
from torchferry.engine.pull.handler import PullHandler
from torchferry.engine.pull.published import SnapshotMemory, publish
from torchferry.engine.pull.reshare import Resharing
from torchferry.engine.pull.version_store import Readers, VersionStore
from torchferry.engine.workspace import Workspace
from torchferry.errors import BadArgument, ReadersRemain
from torchferry.links.address import Address, is_token, listen, parse_host, reachable_host
from torchferry.links.http_server import HttpServer
from torchferry.links.lifecycle import close_after_fork
from torchferry.links.server_connection import Handler
from torchferry.links.sockets import listen_locally
from torchferry.tensors.memory import CPU


@dataclass(frozen=True)
class Status:
    """What a source serves, and who reads or has read it. `versions` has the current version of each name.

    `readers` are the open fetches and the last 1,000 that ended, oldest first.
    """

    versions: dict[str, int]
    readers: tuple[Reader, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        served = ", ".join(f"{name} version {number}" for name, number in self.versions.items()) or "nothing"
        return "\n".join([f"serves {served}", *map(str, self.readers)])


@dataclass
class _Name:
    """A name of a source: the lock of the thread that publishes it, and the memory of its snapshots."""

    publishing: threading.Lock = field(default_factory=threading.Lock)
    memory: SnapshotMemory = field(default_factory=SnapshotMemory)


class Source:
    """Serves states to every process that has its address, until it is closed.

    Its threads run in the background, and delay the end of the process by 0.5 s at most. All methods may be
    called from several threads. After a fork, only the parent serves.

    Args:
        host: the address, host name or network interface ("eth0") to listen on. By default only processes of
            this machine can connect.
        port: the port; 0 for any that is free.
        advertise: the host, or HOST:PORT, to put into `address` instead of the one that this listens on: for
            a source behind NAT, or a DNS name.
        token: the secret that receivers must send; by default 256 random bits. It is a part of `address`.
        tls: a context with a certificate, for `https`.

    Raises:
        BadArgument: an argument is invalid, or this machine can't listen on the host and port.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        arguments.check_str(host, "host")
        port = arguments.check_int(port, "port", low=0, high=65535)
        arguments.check_tls(tls)
        if tls is not None and tls.check_hostname:
            raise BadArgument(
                "tls is a context for clients: a source needs ssl.create_default_context("
                "ssl.Purpose.CLIENT_AUTH) with load_cert_chain()"
            )
        if token is None:
            token = secrets.token_urlsafe(32)
        if len(arguments.check_str(token, "token")) < 16 or not is_token(token):
            raise BadArgument(
                "token must be at least 16 printable ASCII characters, without space, # and %; this one has "
                f"{len(token)} characters"
            )
        if advertise is not None:
            # Before a port is opened.
            parse_host(arguments.check_str(advertise, "advertise"), port)
        listener = listen(host, port)
        self._listens_at = listener.getsockname()[:2]
        own_port = self._listens_at[1]
        named = parse_host(advertise or reachable_host(listener), own_port)
        self._address = Address(*named, token, tls is not None)
        self.workspace = Workspace(CPU)
        self._lock = threading.Lock()
        self._names: dict[str, _Name] = {}
        self._versions = VersionStore(lambda connection: self._server.disconnect(connection))
        listeners, local_name = [listener], None
        # Not every system has abstract Unix sockets, which need no file.
        with suppress(OSError):
            name = secrets.token_hex(16)
            listeners.append(listen_locally(name))
            local_name = name
        handler = PullHandler(self._versions, token, own_port, local_name)
        self._server = HttpServer(listeners, token, handler, tls, self._versions.stop_granting)
        close_after_fork(self)

    @property
    def address(self) -> str:
        """All that a receiver needs: `http://HOST:PORT/#TOKEN`. Whoever has it can read every state here."""
        return self._address.url

    def publish(
        self,
        state: object,
        version: int,
        name: str = "state",
        snapshot: bool = True,
        timeout: Timeout = 30.0,
        readers: Readers = "wait",
        *,
        copy_up_to: int = 0,
    ) -> None:
        """Serve a state as a new version of a name. Readers of the previous version finish undisturbed.

        Args:
            state: tensors and values in any nesting: README lists what can be sent. It may also hold objects
                with `state_dict` and `load_state_dict`; what their `state_dict()` returns now is served.
            version: an int above the current version of the name, normally the training step.
            name: the name that receivers ask for.
            snapshot: copy the state, so that it may change when this returns. The copy's memory is used again
                for later versions. If False, the state is served from its own memory, and must not change
                until `withdraw`, `close` or the next `publish` returns. If it does, its readers fail: the
                digests reveal it, or with `verify=False` only torch's version counters.
            timeout: how long to wait for readers, and for another `publish` of this name. At most two
                versions are in memory, so a third one waits until the oldest has no readers. If the current
                version is not a snapshot, the next one waits for its readers.
            readers: "wait" for readers of versions that must go, or "drop" (disconnect) them.
            copy_up_to: with `snapshot=False`, copy tensors of up to this many bytes all the same, so that
                these may change, like the buffers of BatchNorm in a forward pass. Tensors that share memory
                with a larger one are not copied.

        Raises:
            BadArgument: an argument is invalid, the version is not above the current one, or the source is
                closed.
            Unsendable: something in the state can't be sent.
            StateChanged: the state changed while it was being published.
            ReadersRemain: readers did not finish in time (also a TimeoutError); names them. If they read an
                earlier version that is not a snapshot, the new version is served nevertheless. Names none if
                another thread is still publishing this name.
            StateError: there is no memory for the copy.
        """
        version = arguments.check_int(version, "version")
        arguments.check_bool(snapshot, "snapshot")
        copy_up_to = arguments.check_int(copy_up_to, "copy_up_to", low=0)
        timeout_s = self._check(name, timeout, readers)
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            named = self._names.setdefault(name, _Name())
        if not named.publishing.acquire(timeout=min(left_s(deadline_s), threading.TIMEOUT_MAX)):
            what = f"another thread is publishing {name!r}, and did not finish in {timeout_s:g} s"
            raise ReadersRemain([], f"{what}: publish one version at a time")
        try:
            self._versions.make_room(name, version, left_s(deadline_s), readers)
            published = publish(
                state, version, self.workspace, named.memory, snapshot=snapshot, copy_up_to=copy_up_to
            )
            self._versions.put(name, published, left_s(deadline_s), readers)
        finally:
            named.publishing.release()

    def withdraw(self, name: str = "state", timeout: Timeout = 30.0, readers: Readers = "wait") -> None:
        """Stop serving a name, and return when it has no readers.

        Raises:
            BadArgument: an argument is invalid.
            ReadersRemain: readers did not finish in time (also a TimeoutError); names them.
        """
        timeout_s = self._check(name, timeout, readers)
        with self._lock:
            if name in self._names:
                # The earlier memory is freed when the last snapshot in it is.
                self._names[name].memory = SnapshotMemory()
        self._versions.withdraw(name, timeout_s, readers)

    def give_up(self, version: int, reason: str, name: str = "state") -> None:
        """Let fetches that ask or wait for exactly this version fail, until the next publish or withdraw.

        Raises:
            BadArgument: an argument is invalid.
        """
        version = arguments.check_int(version, "version")
        self._versions.give_up(arguments.check_name(name), version, arguments.check_str(reason, "reason"))

    def wait(self, version: int, receivers: int = 1, timeout: Timeout = 30.0, name: str = "state") -> None:
        """Wait until `receivers` fetches of a version have confirmed that they have every byte.

        Raises:
            BadArgument: an argument is invalid.
            ReadersRemain: fewer confirmed in time (also a TimeoutError); names the readers that did not.
        """
        version = arguments.check_int(version, "version")
        receivers = arguments.check_int(receivers, "receivers", low=1)
        self._versions.wait(name, version, receivers, self._check(name, timeout, "wait"))

    def status(self) -> Status:
        """Return what is served, and who reads or has read it."""
        versions, readers = self._versions.status()
        return Status(versions, tuple(readers))

    def close(self, timeout: Timeout = 5.0) -> None:
        """Stop serving. Readers have `timeout` to finish, and are then disconnected.

        Raises:
            BadArgument: the timeout is invalid.
        """
        timeout_s = arguments.seconds(timeout, "timeout")
        # The server closes last: a reader connects once more to confirm.
        self._versions.close(timeout_s)
        self._server.close()
        with self._lock:
            self._names.clear()

    def resharing(self) -> Resharing:
        """Return what `fetch(reshare=source)` uses to serve chunks at this source's port."""
        return Resharing(self._server, *self._listens_at)

    def attach(self, handler: Handler) -> str:
        """Serve a handler at this source's port, and return its address, with a token of its own."""
        token = secrets.token_urlsafe(32)
        self._server.add_handler(token, handler)
        return replace(self._address, token=token).url

    def is_connected(self, connection: int) -> bool:
        """Return whether a client that waits for the answer of a handler is still connected."""
        return self._server.is_connected(connection)

    def close_inherited(self) -> None:
        """Forget all memory in a forked child. The server closes its sockets itself."""
        self._versions.forget()
        self._names.clear()
        self._lock = threading.Lock()

    def _check(self, name: object, timeout: Timeout, readers: object) -> float:
        arguments.check_name(name)
        arguments.check_choice(readers, "readers", get_args(Readers))
        return arguments.seconds(timeout, "timeout")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Source({self._address})"


def serve(
    state: object,
    version: int,
    *,
    name: str = "state",
    snapshot: bool = True,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Source:
    """Serve a state: create a Source and publish the state. `source.address` is all that `fetch` needs.

    The arguments are those of `Source` and `Source.publish`.

    Raises:
        BadArgument: an argument is invalid, or this machine can't listen on the host and port.
        Unsendable: something in the state can't be sent.
        StateChanged: the state changed while it was being published.
        StateError: there is no memory for the copy.
    """
    source = Source(host, port, advertise=advertise, token=token, tls=tls)
    try:
        source.publish(state, version, name=name, snapshot=snapshot)
    except BaseException:
        source.close()
        raise
    return source
