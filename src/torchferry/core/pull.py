"""The pull protocol: what a receiver asks a source, and the states of a lease and of a fetch.

A receiver opens a lease on one version, reads the manifest and the digests, compares, asks for chunks, and
closes the lease with its result. `docs/protocol.md` has the requests on one page.
"""

import struct
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.msgpack import Decoder
from xxhash import xxh3_64_hexdigest

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.manifest import Count
from torchferry.core.plan import MAX_CHUNKS
from torchferry.errors import BadManifest

PULL_CHUNK_BYTES = 1 << 20
"""The size of a chunk: what a lost connection costs, and what a comparison can skip."""

MAX_PULL_CHUNK_BYTES = 64 << 20
"""The largest chunk that a receiver accepts: it may need a buffer of this size for each lane."""

MAX_WAIT_S = 30.0
"""How long a source lets one request wait for a newer version. The receiver then asks again."""

LEASE_S = 30.0
"""How long a lease lasts without a request, and without a chunk that is sent."""

ALIVE_S = 10.0
"""How often a receiver shows that it is alive, also while it compares or writes."""

ANSWERS_S = 1.0
"""How long a fetch waits for the other sources after the first has granted a lease."""

MAX_AHEAD = 2
"""How many requests for chunks may be in flight on one connection."""

MAX_PEERS = 8
"""How many other receivers a source names in a grant."""

MAX_NAME_CHARACTERS = 200
MAX_REASON_CHARACTERS = 4000

Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]
Version: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a lease on a state: on `version`, on any version above `newer_than`, or on the newest.

    `receiver` is how the source shows the receiver in `status()`. `wait_s` is how long the source may wait
    for a version above `newer_than`. `port` is where the receiver serves what it has verified; 0 for nowhere.
    """

    name: Name
    receiver: Name
    version: Version | None = None
    newer_than: Version | None = None
    wait_s: Annotated[float, Meta(ge=0.0)] = 0.0
    port: Port = 0

    def __str__(self) -> str:
        if self.version is not None:
            return f"version {self.version} of {self.name!r}"
        above = "" if self.newer_than is None else f" above {self.newer_than}"
        return f"a version of {self.name!r}{above}"


class Peer(Struct, frozen=True, forbid_unknown_fields=True):
    """A receiver that serves what it has verified."""

    host: Name
    port: Port


class Grant(Struct, frozen=True, forbid_unknown_fields=True):
    """A lease on one version, and what it takes to plan the fetch.

    Versions of equal `root` hold equal states in equal chunks. `snapshot` says that the state was copied, so
    that it can't change. `memory` names the Unix socket for receivers on the same machine, which may read
    chunks from the source's memory. `port` is where the source listens: a receiver that connected to another
    port has a proxy in between, and bytes go through that. `peers` are receivers that serve what they have of
    this version, to those who know `peer_token`; the one that began last is the first. `metadata` is the
    digest of all that the receiver relies on: see `metadata_digest`.
    """

    lease: Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
    version: Version
    root: Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
    metadata: Annotated[str, Meta(pattern="^[0-9a-f]{16}\\Z")]
    payload_bytes: Count
    chunk_bytes: Annotated[int, Meta(ge=ITEM_BYTES, le=MAX_PULL_CHUNK_BYTES)]
    pack_bytes: Annotated[int, Meta(ge=0, le=MAX_PULL_CHUNK_BYTES)]
    chunks: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]
    snapshot: bool = False
    memory: Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")] | None = None
    port: Port = 0
    peers: Annotated[tuple[Peer, ...], Meta(max_length=MAX_PEERS)] = ()
    peer_token: Annotated[str, Meta(pattern="^([0-9a-f]{64})?\\Z")] = ""

    def __repr__(self) -> str:
        # Without the token.
        return f"Grant(version={self.version}, root={self.root!r}, chunks={self.chunks}, peers={self.peers})"


class InMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """Where chunks are, from `offset` on: in the memory whose descriptor comes with the response."""

    offset: Count


class Result(Struct, frozen=True, forbid_unknown_fields=True):
    """What became of a fetch. It ends the lease. `verified` says whether every byte was checked."""

    outcome: Literal["confirmed", "refused", "failed"]
    reason: Reason = ""
    verified: bool = True


class Failure(Struct, frozen=True, forbid_unknown_fields=True):
    """Why a request failed: the body of every response with a status from 400 on, except 401 and 503."""

    reason: Reason


# The status of a response.
OK = 200
GRANTED = 201
IN_MEMORY = 202  # the chunks are not in the body, but in shared memory
NOTHING = 204  # nothing newer yet, or nothing to say
BAD_REQUEST = 400
UNAUTHORIZED = 401  # no token, or a wrong one
UNKNOWN = 404  # no such name, version or path
CHANGED = 409  # the state changed after it was published, or could not be published
LEASE_ENDED = 410
UNREADABLE = 500  # the source can't read its state any more
TOO_MANY = 503  # connections

lease_request_decoder = Decoder(LeaseRequest)
grant_decoder = Decoder(Grant)
in_memory_decoder = Decoder(InMemory)
result_decoder = Decoder(Result)
failure_decoder = Decoder(Failure)


def encode_digests(digests: Sequence[int]) -> bytes:
    """Encode the digests of all chunks: 8 bytes each, little-endian."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def decode_digests(data: bytes) -> tuple[int, ...]:
    """Decode the digests of all chunks; raises BadManifest if they are not 8 bytes each."""
    if len(data) % 8:
        raise BadManifest(f"the digests have {len(data)} bytes, which is not a multiple of 8")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def metadata_digest(manifest: bytes, digests: bytes, version: int, root: str) -> str:
    """Return the XXH3 of the encoded manifest and digests, and of what the grant says of them."""
    return xxh3_64_hexdigest(b"".join((manifest, digests, f"{version} {root}".encode())))


def fits(request: LeaseRequest, version: int) -> bool:
    """Return whether a version is what a receiver asks for."""
    if request.newer_than is not None and version <= request.newer_than:
        return False
    return request.version is None or request.version == version


def is_settled(
    grants: Sequence[Grant | None], pending: Collection[int], wanted: LeaseRequest, waited_s: float
) -> bool:
    """Return whether to choose a version now.

    It is time if no answer that is `pending` could change the choice, or ANSWERS_S after the first grant.
    `pending` lists the sources that have not answered, and `waited_s` is the time since the first granted.
    """
    first = next((number for number, grant in enumerate(grants) if grant is not None), None)
    if first is None:
        return not pending
    # If all grants are on the same version, that of the first source is chosen.
    could_change = [number for number in pending if wanted.version is None or number < first]
    return not could_change or waited_s >= ANSWERS_S


def choose(grants: Sequence[Grant | None]) -> Grant | None:
    """Return the grant of the version to fetch: the highest, and of equal ones that of the first source."""
    granted = [grant for grant in grants if grant is not None]
    return max(granted, key=lambda grant: grant.version, default=None)


def why_not_mixed(grant: Grant, chosen: Grant) -> str:
    """Return why a source can't deliver chunks of the chosen grant; empty if it can."""
    if grant.version != chosen.version:
        return f"it serves version {grant.version}, not {chosen.version}"
    if grant.root != chosen.root:
        roots = f"its root is {grant.root[:8]}…, not {chosen.root[:8]}…"
        return f"its version {grant.version} holds another state than that of the chosen source: {roots}"
    return ""


class LeaseState(Enum):
    """The state of a lease, and the states that may follow it. Only an open lease keeps its version."""

    OPEN = "reading", "confirmed", "refused", "failed", "lost", "dropped"
    CONFIRMED = ("confirmed",)  # final: the receiver has every byte, verified unless verification is off
    REFUSED = ("refused",)  # final: the state did not fit the receiver's
    FAILED = ("failed",)  # final: the receiver gave up
    LOST = ("lost",)  # final: its last connection was closed, or it was silent for LEASE_S
    DROPPED = ("dropped",)  # final: the source needed the memory, withdrew the version or closed

    def __init__(self, label: str, *following: str) -> None:
        self.label = label
        self.following = following


class FetchState(Enum):
    """The state of a fetch: a label, its `phase` in reports and errors, and the states that may follow."""

    CONNECTING = "connecting", "connect", "manifest"  # until a source granted a lease on a version
    MANIFEST = "manifest", "receive metadata", "comparing"
    COMPARING = "comparing", "compare", "receiving", "refused"  # by metadata, and by digests
    RECEIVING = "receiving", "receive tensors", "assembling"
    ASSEMBLING = "assembling", "assemble", "confirming"  # with atomic=True, the local state is written here
    CONFIRMING = "confirming", "confirm", "done"
    DONE = "done", ""  # final
    REFUSED = "refused", ""  # final: no chunk was requested

    def __init__(self, label: str, phase: str, *following: str) -> None:
        self.label = label
        self.phase = phase
        self.following = following
