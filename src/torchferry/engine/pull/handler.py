"""Answers the requests of receivers: leases, metadata, chunks, results. `docs/protocol.md` lists them."""

import hmac
import logging
import re

from msgspec import msgpack

from torchferry.core import pull
from torchferry.core.codec import decode_value
from torchferry.core.leases import Lease
from torchferry.engine.pull.published import Published
from torchferry.engine.pull.version_store import VersionStore
from torchferry.errors import LinkBroken, NoSuchVersion, PeerError, PeerGaveUp, StateError
from torchferry.links.server_connection import Request, Response

logger = logging.getLogger(__name__)

_LEASE_PATH = re.compile(
    r"/v1/leases/([0-9a-f]{32})/"
    r"(?:(manifest|digests|alive|result)|(chunks|damaged)/([0-9]{1,9})-([0-9]{1,9}))"
)


class PullHandler:
    """Answers requests about the versions of a source.

    `secret` is the HMAC key from which the tokens for peers are derived. `local_name` is the name of the Unix
    socket for receivers on the same machine; None if there is none.
    """

    def __init__(self, versions: VersionStore, secret: str, port: int, local_name: str | None = None) -> None:
        self._versions = versions
        self._secret = secret.encode()
        self._port = port
        self._local_name = local_name

    def disconnected(self, connection: int) -> None:
        """End the leases whose last connection this was."""
        self._versions.disconnected(connection)

    def answer(self, request: Request) -> Response:
        """Answer a request. Every error becomes a status and a reason."""
        try:
            # Leases are granted over TCP only: TLS may require a certificate, and the Unix socket has no TLS.
            if (request.method, request.path, request.local) == ("POST", "/v1/leases", False):
                return self._grant(request)
            found = _LEASE_PATH.fullmatch(request.path)
            if found is None:
                return _failure(pull.UNKNOWN, "there is nothing at this path")
            lease_id, document, about_chunks, first, end = found.groups()
            what = document or about_chunks
            if request.local and what != "chunks":
                return _failure(pull.BAD_REQUEST, "only chunks may be requested over the Unix socket")
            if request.method != ("POST" if what in ("alive", "result", "damaged") else "GET"):
                return _failure(pull.BAD_REQUEST, f"{request.method} is not for this path")
            lease = self._versions.find(lease_id, request.connection)
            if about_chunks:
                return self._answer_about_chunks(request, lease, what, int(first), int(end))
            if what == "result":
                return self._finish(lease, request.body)
            if what == "alive":
                return Response(pull.NOTHING)
            published = lease.held
            data = published.encoded.data if what == "manifest" else published.encoded_digests
            return Response(pull.OK, data, _etag(published))
        except NoSuchVersion as error:
            return _failure(pull.UNKNOWN, error.what)
        except LinkBroken as error:
            # The lease has ended, or the source grants none: it is closed or has too many readers.
            return _failure(pull.LEASE_ENDED, error.what)
        except PeerGaveUp as error:
            return _failure(pull.CHANGED, error.what)
        except PeerError as error:
            return _failure(pull.BAD_REQUEST, error.what)
        except StateError as error:
            return _failure(pull.UNREADABLE, error.what)

    def _grant(self, request: Request) -> Response:
        wanted = decode_value(request.body, pull.lease_request_decoder)
        wait_s = min(wanted.wait_s, pull.MAX_WAIT_S)
        found = self._versions.lease(wanted, wait_s, request.connection, request.host)
        if found is None:
            return Response(pull.NOTHING)
        lease, peers = found
        published, block = lease.held, lease.held.block
        about = f"{lease.name} {published.version} {published.root}".encode()
        logger.debug("lease %s: %s reads version %d", lease.id[:8], lease.receiver, published.version)
        grant = pull.Grant(
            lease=lease.id,
            version=published.version,
            root=published.root,
            metadata=published.metadata,
            payload_bytes=published.nbytes,
            chunk_bytes=published.plan.chunk_bytes,
            pack_bytes=published.plan.pack_bytes,
            chunks=len(published.plan.chunks),
            snapshot=published.is_copy,
            memory=None if block is not None and block.shared is None else self._local_name,
            port=self._port,
            peers=peers,
            peer_token=hmac.digest(self._secret, about, "sha256").hex(),
        )
        return Response(pull.GRANTED, msgpack.encode(grant))

    def _answer_about_chunks(
        self, request: Request, lease: Lease[Published], what: str, first: int, end: int
    ) -> Response:
        published = lease.held
        if not 0 <= first < end <= len(published.plan.chunks):
            return _failure(
                pull.BAD_REQUEST,
                f"chunks {first}-{end} do not exist: the version has {len(published.plan.chunks)}",
            )
        if paths := self._versions.changed_paths(lease, first if what == "damaged" else None):
            return _changed(paths)
        if what == "damaged":
            logger.debug("lease %s: chunk %d arrived damaged", lease.id[:8], first)
            return Response(pull.NOTHING)
        shared = self._versions.share(lease)
        offset, nbytes = published.start(first), published.size(first, end)
        if request.local and shared is not None:
            # A receiver on this machine reads the snapshot itself.
            self._versions.note_read(lease, nbytes)
            return Response(pull.IN_MEMORY, msgpack.encode(pull.InMemory(offset)), memory=shared)
        buffers = self._versions.read(lease, first, end)
        return Response(pull.OK, b"", _etag(published), nbytes, buffers, shared, offset)

    def _finish(self, lease: Lease[Published], body: bytes) -> Response:
        result = decode_value(body, pull.result_decoder)
        # Without verification, the receiver may have a mixture of old and new bytes.
        is_unverified = result.outcome == "confirmed" and not result.verified
        if is_unverified and (paths := self._versions.changed_paths(lease)):
            return _changed(paths)
        self._versions.finish(lease, result)
        logger.debug("lease %s: %s %s", lease.id[:8], lease.receiver, result.outcome)
        return Response(pull.NOTHING)


def _etag(published: Published) -> tuple[tuple[str, str], ...]:
    return (("ETag", f'"{published.root}"'),)


def _failure(status: int, reason: str) -> Response:
    return Response(status, msgpack.encode(pull.Failure(reason[: pull.MAX_REASON_CHARACTERS])))


def _changed(paths: list[str]) -> Response:
    shown = ", ".join(paths[:10])
    return _failure(pull.CHANGED, f"the source's state changed after it was published ({shown})")
