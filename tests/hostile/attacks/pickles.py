"""Pickles: they import, construct, call, confuse the reader before the unpickler, or are too large."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from pathlib import Path

from tests.hostile.attacks.base import attack
from torchferry.errors import BadManifest, PeerError, PickleRefused

CANARY = Path(tempfile.gettempdir()) / f"torchferry-canary-{os.getpid()}"
"""Every pickle in this module creates this directory if it is executed."""

PROTO = b"\x80\x04"
PATH = str(CANARY).encode()
CALL = b"cos\nmkdir\n(V" + PATH + b"\ntR."


def text(data: bytes) -> bytes:
    return b"\x8c" + bytes([len(data)]) + data


@attack(PickleRefused)
def imports_and_calls() -> bytes:
    """GLOBAL and REDUCE, the classic."""
    return CALL


@attack(PickleRefused)
def imports_from_the_stack() -> bytes:
    """STACK_GLOBAL takes its names from strings, so no opcode shows them."""
    return PROTO + text(b"os") + text(b"mkdir") + b"\x93" + text(PATH) + b"\x85R."


@attack(PickleRefused)
def imports_by_instance() -> bytes:
    """INST imports and calls in one opcode."""
    return b"(V" + PATH + b"\nios\nmkdir\n."


@attack(PickleRefused)
def builds_an_object() -> bytes:
    """OBJ calls what is on the stack."""
    return b"(cos\nmkdir\nV" + PATH + b"\no."


@attack(PickleRefused)
def with_an_unknown_protocol() -> bytes:
    """A protocol from the future must not stop the reader, for the unpickler stops only there."""
    return b"\x80\xff" + CALL


@attack(PickleRefused)
def behind_a_repeated_protocol() -> bytes:
    """PROTO may come again, at any place."""
    return b"\x80\x02N0\x80\x05" + CALL


@attack(PickleRefused)
def behind_a_number_that_only_c_reads() -> bytes:
    """The unpickler reads I0x10 as C does, pickletools can't: the parser must not stop as if it had ended."""
    return b"I0x10\n0" + CALL


@attack(PickleRefused)
def behind_a_number_with_a_nul() -> bytes:
    """C stops reading a number at a NUL."""
    return b"I1\x00\n0" + CALL


@attack(PickleRefused)
def behind_a_float_with_underscores() -> bytes:
    """Python takes 1_0, and so might one of the two readers."""
    return b"F1_0\n0" + CALL


@attack(PickleRefused)
def behind_a_string_without_quotes() -> bytes:
    """What one reader calls malformed, the other may skip."""
    return b"Sno quotes\n0" + CALL


@attack(PickleRefused)
def behind_text_that_is_no_utf8() -> bytes:
    """Surrogates and half characters."""
    return PROTO + b"\x8c\x03\xed\xa0\x800" + CALL


@attack(PickleRefused)
def behind_a_frame_that_ends_early() -> bytes:
    """FRAME claims that the rest is shorter than it is."""
    return PROTO + b"\x95" + struct.pack("<Q", 1) + b"N0" + CALL


@attack(PickleRefused)
def behind_a_frame_that_never_ends() -> bytes:
    """FRAME claims 2**62 bytes."""
    return PROTO + b"\x95" + struct.pack("<Q", 2**62) + b"N0" + CALL


@attack(PickleRefused)
def behind_a_stop_that_is_text() -> bytes:
    """A STOP inside a string is no STOP."""
    return PROTO + text(b"....") + b"0" + CALL


@attack(BadManifest)
def behind_the_end() -> bytes:
    """What comes after STOP is never read."""
    return b"N." + CALL


@attack(BadManifest)
def behind_a_byte_that_is_no_opcode() -> bytes:
    """Both readers end there."""
    return b"N0\xfe" + CALL


@attack(PickleRefused)
def calls_an_extension() -> bytes:
    """EXT4 names a global by a number that some library has registered."""
    return PROTO + b"\x84\x01\x00\x00\x00."


@attack(PickleRefused)
def asks_for_a_persistent_object() -> bytes:
    """PERSID calls whatever the unpickler has for it."""
    return b"Pname\n."


@attack(PickleRefused)
def remembers_at_a_huge_number() -> bytes:
    """LONG_BINPUT makes the unpickler set aside a memo of 8 GiB."""
    return PROTO + b"]r\xff\xff\xff\x3f."


@attack(PickleRefused)
def remembers_at_a_huge_number_in_text() -> bytes:
    """PUT does the same."""
    return b"]p1000000000\n."


@attack(PickleRefused)
def claims_a_huge_bytearray() -> bytes:
    """BYTEARRAY8 sets aside what it says before it looks whether it is there."""
    return b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."


@attack(PickleRefused)
def claims_huge_bytes() -> bytes:
    """BINBYTES8 with 2**60 bytes to come."""
    return PROTO + b"\x8e" + struct.pack("<Q", 1 << 60) + b"."


@attack(PickleRefused)
def claims_a_huge_text() -> bytes:
    """BINUNICODE8 with 2**60 bytes to come."""
    return PROTO + b"\x8d" + struct.pack("<Q", 1 << 60) + b"."


@attack(PickleRefused)
def claims_a_negative_length() -> bytes:
    """LONG4 with a length below zero."""
    return PROTO + b"\x8b\xff\xff\xff\xff."


@attack(PickleRefused)
def hashes_nested_tuples() -> bytes:
    """A set of tuples in tuples, each twice the same: its hash takes 2**60 steps."""
    return PROTO + b"\x8f(K\x01" + b"2\x86" * 60 + b"\x90."


@attack(BadManifest)
def nests_shared_tuples() -> bytes:
    """The same without a hash: small, as long as nobody walks through it, shows it or compares it."""
    return PROTO + b"K\x01" + b"2\x86" * 20_000 + b"."


@attack(BadManifest)
def nests_lists_deep() -> bytes:
    """Thirty thousand lists in each other: freeing them must not overflow the stack."""
    return PROTO + b"]" * 30_000 + b"a" * 29_999 + b"."


@attack(PickleRefused)
def laughs_a_billion_times() -> bytes:
    """Two hundred megabytes of references to one list: minutes to read, 1.6 GB to load."""
    return PROTO + b"]\x94(" + b"h\x00" * (100 << 20) + b"e."


@attack(PickleRefused)
def makes_millions_of_lists() -> bytes:
    """One byte on the wire, 56 in memory."""
    return PROTO + b"(" + b"]" * (64 << 20) + b"l."


@attack(BadManifest)
def pops_an_empty_stack() -> bytes:
    """The unpickler's own checks are relied on for this."""
    return b"0000."


@attack(BadManifest)
def takes_what_was_never_put() -> bytes:
    """GET of a number that is not in the memo."""
    return b"g123456789\n."


@attack(PeerError)
def is_a_number_of_many_digits() -> bytes:
    """Quadratic in Python, but for its limit."""
    return b"L" + b"9" * 60_000 + b"L\n."


@attack(PickleRefused)
def is_a_dict_with_colliding_keys() -> bytes:
    """Any pickled dict is refused: its keys are hashed while it is loaded."""
    return pickle.dumps({n * (2**61 - 1): None for n in range(1000)})
