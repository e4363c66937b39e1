"""The push protocol: the states of both ends, and the bytes around the payload.

A sender sends the length of a frame, the frame (`codec`), and then the chunks of the plan (`plan`), in
order. If the state is small, the frame has the digests of all chunks. Otherwise digest blocks are sent
between the chunks, so that sending begins before the whole state is hashed. Without verification there are no
digests. A sender or a forwarding receiver that fails sends an abort instead of the next message.

The frame of a large state may offer memory, for receivers on the sender's machine. Then each receiver sends
one message back, its answer, before the payload: whether it takes the memory, and whether it wants the state.
`docs/protocol.md` has the protocol on one page.
"""

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from torchferry.core.manifest import Count
from torchferry.core.plan import Chunk, Plan
from torchferry.errors import BadManifest


class SenderState(Enum):
    """The state of a sender towards one receiver, and the states that may follow it."""

    DESCRIBING = "describing", "offering", "sending", "refused"  # nothing is sent yet
    REFUSED = "refused"  # final: a refusal was sent instead of the frame
    OFFERING = "offering", "sending", "rejected"  # the frame offers memory, and the receiver has to answer
    REJECTED = "rejected"  # final: the receiver rejected the state, and gets nothing more
    SENDING = "sending", "sent", "aborted"  # the frame, and the payload if the receiver gets it from here
    ABORTED = "aborted"  # final: the receiver was told that no more messages follow
    SENT = "sent"  # final: the link has every byte

    def __init__(self, label: str, *following: str) -> None:
        self.label = label
        self.following = following


class ReceiverState(Enum):
    """The state of a receiver: a label, `messages_pending`, `phase`, and the states that may follow it.

    `phase` is its name in reports and errors. With `messages_pending`, messages may still arrive: if the
    receiver fails, the group can't be used again.
    """

    # The local state is described while the sender describes its own.
    DESCRIBING = "describing", False, "describe", "waiting"
    WAITING = "waiting", True, "wait", "frame"  # for the length of a frame
    # The frame arrives and is decoded. A refusal for another step is skipped, and the receiver waits again.
    FRAME = "frame", True, "receive metadata", "comparing", "rejected", "waiting"
    # The incoming state is compared with the local one.
    COMPARING = "comparing", True, "compare", "answering", "receiving", "draining"
    ANSWERING = "answering", True, "compare", "receiving", "rejected"  # the sender offers memory
    DRAINING = "draining", True, "compare", "rejected"  # the rejected state is received and dropped
    RECEIVING = "receiving", True, "receive tensors", "checking"  # messages arrive and are written
    CHECKING = "checking", False, "receive tensors", "assembling"  # every message has arrived
    ASSEMBLING = "assembling", False, "assemble", "done"  # containers are built around the received tensors
    DONE = "done", False  # final
    REJECTED = "rejected", False  # final: drained, or the sender knows it, or it refused to send

    def __init__(self, label: str, messages_pending: bool, phase: str = "", *following: str) -> None:
        self.label = label
        self.messages_pending = messages_pending
        self.phase = phase
        self.following = following


NONCE_BYTES = 16


class TransferId(NamedTuple):
    """The identity of a transfer: the sending rank, its number for the transfer, and random bytes."""

    origin: int
    serial: int
    nonce: bytes


TOKEN_BYTES = 16
"""The size of the token in an offer of memory. It names the socket that the receiver connects to."""


class Answer(Enum):
    """What a receiver answers if the frame offers memory."""

    TAKEN = 1  # it has connected: the payload comes through memory
    DECLINED = 2  # the payload comes over the group
    REJECTED = 3  # it does not want the state: no payload comes


ANSWER_BYTES = NONCE_BYTES + 8


def encode_answer(nonce: bytes, answer: Answer) -> bytes:
    """Encode the answer to an offer of memory.

    >>> decode_answer(encode_answer(bytes(NONCE_BYTES), Answer.TAKEN), bytes(NONCE_BYTES))
    <Answer.TAKEN: 1>
    """
    return nonce + answer.value.to_bytes(8, "little")


def decode_answer(data: bytes, nonce: bytes) -> Answer:
    """Decode the answer to an offer of memory; raises BadManifest if it is not one for this transfer."""
    for answer in Answer:
        if data == encode_answer(nonce, answer):
            return answer
    raise BadManifest("the receiver's answer was damaged on the way, or belongs to another transfer")


class Route(Struct, frozen=True, array_like=True):
    """Where one receiver gets the payload from, and which receiver it forwards the payload to.

    `before` lists the receivers between the sender and `upstream`, the nearest to `upstream` first.
    """

    upstream: Count
    next: Count | None = None
    before: tuple[Count, ...] = ()


def chain(origin: int, receivers: Sequence[int]) -> dict[int, Route]:
    """Return the route of each receiver if they forward to each other in the given order.

    >>> chain(0, [4, 2])
    {4: Route(upstream=0, next=2, before=()), 2: Route(upstream=4, next=None, before=())}
    """
    routes: dict[int, Route] = {}
    passed = [origin]  # the nearest to the receiver first
    for receiver, follower in zip(receivers, (*receivers[1:], None), strict=False):
        routes[receiver] = Route(passed[0], follower, tuple(passed[1:-1]))
        passed.insert(0, receiver)
    return routes


_ABORT = b"torchferry:abort"
ABORT_BYTES = len(_ABORT) + NONCE_BYTES + 8


def encode_abort(nonce: bytes, failed_rank: int) -> bytes:
    """Encode the abort that is sent instead of a transfer's next message.

    >>> decode_abort(encode_abort(bytes(NONCE_BYTES), 3) + b"more", bytes(NONCE_BYTES))
    3
    """
    return _ABORT + nonce + failed_rank.to_bytes(8, "little")


def decode_abort(head: bytes, nonce: bytes) -> int | None:
    """Return the failed rank if a message begins with an abort of this transfer, else None."""
    if not nonce or len(head) < ABORT_BYTES or not head.startswith(_ABORT + nonce):
        return None
    return int.from_bytes(head[ABORT_BYTES - 8 : ABORT_BYTES], "little")


class DigestBlock(Struct, frozen=True, gc=False):
    """The digests of chunks `first` to `end - 1`. The last block also says whether the state changed."""

    first: int
    end: int
    is_last: bool

    @property
    def nbytes(self) -> int:
        """The size on the wire. An abort fits too, because it may be sent instead."""
        return max(NONCE_BYTES + 8 * (self.end - self.first + 1), ABORT_BYTES)


def encode_block(block: DigestBlock, digests: Sequence[int], nonce: bytes, *, changed: bool = False) -> bytes:
    """Encode a digest block: the nonce, whether the state changed, and a 64-bit digest for each chunk."""
    return (nonce + struct.pack(f"<{len(digests) + 1}Q", changed, *digests)).ljust(block.nbytes, b"\0")


def decode_block(block: DigestBlock, data: bytes) -> tuple[bytes, tuple[int, ...], bool]:
    """Return the nonce and the digests of a block, and whether the state changed."""
    count = block.end - block.first
    changed, *digests = struct.unpack_from(f"<{count + 1}Q", data, NONCE_BYTES)
    return data[:NONCE_BYTES], tuple(digests), changed != 0


BLOCK_CHUNKS = 64
"""The chunks per digest block: 512 MiB. More blocks find damage earlier, but delay hashing."""
BLOCK_LAG = 8
"""How many chunks a digest block is sent after its last chunk, which is hashed meanwhile."""


def payload_order(plan: Plan, *, digest_blocks: bool) -> list[Chunk | DigestBlock]:
    """Return the chunks of a plan, and with `digest_blocks` also the digest blocks, as they are sent."""
    if not digest_blocks:
        return list(plan.chunks)
    found: list[Chunk | DigestBlock] = []
    count, sent = len(plan.chunks), 0
    for first in range(0, count, BLOCK_CHUNKS):
        end = min(first + BLOCK_CHUNKS, count)
        found += plan.chunks[sent : end + BLOCK_LAG]
        found.append(DigestBlock(first, end, end == count))
        sent = end + BLOCK_LAG
    return found


HASH_FIRST_BYTES = 1 << 20
"""States up to this size are hashed before they are sent, which takes 0.1 ms and saves a message."""

OFFER_FROM_BYTES = 8 << 20
"""Memory is offered for states from this size on. For smaller ones, gloo takes less time than the ring."""

MAX_METADATA_BYTES = 256 << 20
"""The longest frame that is accepted by default. A hundred thousand tensors need about 6 MiB."""


def check_length(length: int, max_bytes: int) -> None:
    """Check the announced length of a frame before memory is allocated for it; raises BadManifest."""
    if not 0 < length <= max_bytes:
        raise BadManifest(
            f"the peer announces {length} bytes of metadata; 1 to {max_bytes} are accepted. Either the peer "
            "does not run a torchferry transfer, or max_metadata_bytes is too small for the state"
        )
