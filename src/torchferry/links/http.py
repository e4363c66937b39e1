"""What both ends of an HTTP/1.1 connection share. h11 reads and writes every head."""

import h11

MAX_HEAD_BYTES = 16 << 10
READ_BYTES = 64 << 10

RING_HEADER = "Torchferry-Ring"
"""In the head of a response over a Unix socket: its body comes through a ring of so many slots, whose
descriptor comes with the head."""


def reason_of(error: Exception) -> str:
    """Return the reason of an error for users and logs. h11 quotes headers, which may have a token."""
    return "the peer does not speak HTTP/1.1" if isinstance(error, h11.ProtocolError) else str(error)
