"""The frame around the manifest: lengths, versions, digests, chunks, serial numbers, digest blocks."""

from __future__ import annotations

from tests.hostile.attacks.base import attack, attacks, frame_of, framed, one_value, raw, spec, tensors
from torchferry.core.codec import MAGIC, VERSION, Frame, encode
from torchferry.errors import BadManifest, Corrupted, PeerError

STATE = [0, [], [["value", [], None, None]], [], []]

attacks(
    "envelopes",
    {
        "is_cut_after_the_magic": lambda: MAGIC,
        "is_of_another_version": lambda: MAGIC + bytes([VERSION + 1]) + b"\x00" * 100,
        "has_a_wrong_digest": lambda: MAGIC + bytes([VERSION]) + b"\x00" * 8 + b"\x93\x01\x02\x03",
        "has_no_body": lambda: framed(b""),
        "has_bytes_behind_it": lambda: framed(encode(Frame(one_value(1), 1 << 20))[13:] + b"\xc0"),
        "has_a_chunk_of_nothing": lambda: raw([STATE, 0]),
        "has_a_chunk_of_one_byte": lambda: raw([STATE, 1]),
        "has_a_chunk_of_2_to_the_62": lambda: raw([STATE, 2**62]),
        "has_a_negative_chunk": lambda: raw([STATE, -1]),
        "has_a_step_that_is_a_text": lambda: raw([STATE, 1 << 20, "first"]),
        "has_a_step_that_is_a_float": lambda: raw([STATE, 1 << 20, 1.5]),
        "has_a_negative_serial": lambda: raw([STATE, 1 << 20, None, -1]),
        "has_a_serial_beyond_63_bits": lambda: raw([STATE, 1 << 20, None, 2**63]),
        "has_a_nonce_of_one_byte": lambda: raw([STATE, 1 << 20, None, 0, b"n"]),
        "has_a_nonce_of_a_megabyte": lambda: raw([STATE, 1 << 20, None, 0, b"n" * (1 << 20)]),
        "has_too_many_digests": lambda: raw([STATE, 1 << 20, None, 0, b"", [1]]),
        "has_too_few_digests": lambda: tensors(spec(), digests=()),
        "has_digests_that_are_texts": lambda: raw([STATE, 1 << 20, None, 0, b"", ["x"]]),
        "has_digests_and_digest_blocks": lambda: tensors(
            spec(), nonce=b"n" * 16, digests=(1,), digest_blocks=True
        ),
        "announces_digest_blocks_by_a_number": lambda: raw([STATE, 1 << 20, None, 0, b"", None, 1]),
        "is_a_million_empty_arrays": lambda: framed(b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000),
        "is_an_array_that_claims_more": lambda: framed(b"\xdd\xff\xff\xff\xff"),
        "is_a_text_that_claims_more": lambda: framed(b"\xdb\xff\xff\xff\xff"),
        "is_bytes_that_claim_more": lambda: framed(b"\xc6\xff\xff\xff\xff"),
        "is_an_extension_that_claims_more": lambda: framed(b"\xc9\xff\xff\xff\xff\x02"),
        "is_a_map_that_claims_more": lambda: framed(b"\xdf\xff\xff\xff\xff"),
        "has_tensors_that_claim_to_be_many": lambda: framed(b"\x92\x95\x00\x90\x90\xdd\xff\xff\xff\xff"),
        "has_a_text_that_is_no_utf8": lambda: framed(
            b"\x92\x95\x00\x90\x91\x94\xa5v\xff\xfe\xfdu\x90\xc0\xc0\x90\x90\x10"
        ),
    },
)


@attack(PeerError)
def is_empty_but_for_zeros() -> bytes:
    """The content of a buffer that received no message."""
    return b"\x00" * 1000


@attack(None)
def has_the_largest_serial_and_step() -> bytes:
    """Numbers that are valid, and wrap around."""
    return frame_of(one_value(1), serial=2**63 - 1, step=-(2**63))


@attack(Corrupted, payload=[b"\x00" * 16])
def has_a_digest_of_something_else() -> bytes:
    """The payload does not match its digest."""
    return tensors(spec(), digests=(12345,))


@attack(BadManifest)
def asks_for_a_million_messages() -> bytes:
    """Eight mebibytes in chunks of sixteen bytes."""
    return tensors(spec((8 << 20,), dtype="uint8", itemsize=1), chunk_bytes=16)
