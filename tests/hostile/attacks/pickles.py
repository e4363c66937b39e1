"""Pickles that import, construct or call, that parser and unpickler read differently, or that are large."""

from __future__ import annotations

import os
import pickle
import struct
import tempfile
from pathlib import Path

from tests.hostile.attacks.base import attack
from torchferry.errors import PeerError, PickleRefused

CANARY = Path(tempfile.gettempdir()) / f"torchferry-canary-{os.getpid()}"
"""Every pickle in this module creates this directory if it is executed."""

PROTO = b"\x80\x04"
PATH = str(CANARY).encode()
CALL = b"cos\nmkdir\n(V" + PATH + b"\ntR."


def text(data: bytes) -> bytes:
    return b"\x8c" + bytes([len(data)]) + data


@attack(PickleRefused)
def imports_and_calls() -> bytes:
    """GLOBAL and REDUCE, the most common exploit."""
    return CALL


@attack(PickleRefused)
def imports_from_the_stack() -> bytes:
    """STACK_GLOBAL pops its names from the stack, so no opcode has them."""
    return PROTO + text(b"os") + text(b"mkdir") + b"\x93" + text(PATH) + b"\x85R."


@attack(PickleRefused)
def imports_by_instance() -> bytes:
    """INST imports and calls in one opcode."""
    return b"(V" + PATH + b"\nios\nmkdir\n."


@attack(PickleRefused)
def builds_an_object() -> bytes:
    """OBJ calls the object on the stack."""
    return b"(cos\nmkdir\nV" + PATH + b"\no."


@attack(PickleRefused)
def with_an_unknown_protocol() -> bytes:
    """An unknown protocol must not stop the parser."""
    return b"\x80\xff" + CALL


@attack(PickleRefused)
def behind_a_repeated_protocol() -> bytes:
    """PROTO may be repeated anywhere."""
    return b"\x80\x02N0\x80\x05" + CALL


@attack(PickleRefused)
def behind_a_number_that_only_c_reads() -> bytes:
    """The unpickler accepts I0x10, pickletools does not: the parser must not stop there."""
    return b"I0x10\n0" + CALL


@attack(PickleRefused)
def behind_a_number_with_a_nul() -> bytes:
    """The unpickler ends a number at a NUL."""
    return b"I1\x00\n0" + CALL


@attack(PickleRefused)
def behind_a_float_with_underscores() -> bytes:
    """Python accepts 1_0, and so might only one of the parser and the unpickler."""
    return b"F1_0\n0" + CALL


@attack(PickleRefused)
def behind_a_string_without_quotes() -> bytes:
    """The parser may reject a string that the unpickler skips."""
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
    """A STOP inside a string does not end the pickle."""
    return PROTO + text(b"....") + b"0" + CALL


@attack(PickleRefused)
def behind_the_end() -> bytes:
    """The unpickler does not read beyond STOP."""
    return b"N." + CALL


@attack(PickleRefused)
def behind_a_byte_that_is_no_opcode() -> bytes:
    """Both the parser and the unpickler end there."""
    return b"N0\xfe" + CALL


@attack(PickleRefused)
def calls_an_extension() -> bytes:
    """EXT4 refers to a global by a number that a library may have registered."""
    return PROTO + b"\x84\x01\x00\x00\x00."


@attack(PickleRefused)
def asks_for_a_persistent_object() -> bytes:
    """PERSID calls the unpickler's persistent_load."""
    return b"Pname\n."


@attack(PickleRefused)
def writes_a_huge_memo_entry() -> bytes:
    """LONG_BINPUT makes the unpickler allocate a memo of 8 GiB."""
    return PROTO + b"]r\xff\xff\xff\x3f."


@attack(PickleRefused)
def writes_a_huge_memo_entry_in_text() -> bytes:
    """PUT does the same."""
    return b"]p1000000000\n."


@attack(PickleRefused)
def claims_a_huge_bytearray() -> bytes:
    """BYTEARRAY8 allocates the claimed size before it checks the data."""
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
    """A set of nested tuples with repeated items: its hash needs 2**60 steps."""
    return PROTO + b"\x8f(K\x01" + b"2\x86" * 60 + b"\x90."


@attack(PickleRefused)
def nests_shared_tuples() -> bytes:
    """The same without a hash. It must not be traversed, printed or compared."""
    return PROTO + b"K\x01" + b"2\x86" * 20_000 + b"."


@attack(PickleRefused)
def nests_lists_deep() -> bytes:
    """Thirty thousand nested lists: freeing them must not overflow the stack."""
    return PROTO + b"]" * 30_000 + b"a" * 29_999 + b"."


@attack(PickleRefused)
def has_millions_of_references_to_one_list() -> bytes:
    """Two hundred megabytes of references to one list: minutes to read, 1.6 GB to load."""
    return PROTO + b"]\x94(" + b"h\x00" * (100 << 20) + b"e."


@attack(PickleRefused)
def makes_millions_of_lists() -> bytes:
    """One byte on the wire, 56 in memory."""
    return PROTO + b"(" + b"]" * (64 << 20) + b"l."


@attack(PickleRefused)
def pops_an_empty_stack() -> bytes:
    """The unpickler itself checks this."""
    return b"0000."


@attack(PickleRefused)
def reads_an_unset_memo_entry() -> bytes:
    """GET of a number that is not in the memo."""
    return b"g123456789\n."


@attack(PeerError)
def is_a_number_of_many_digits() -> bytes:
    """Parsing is quadratic in Python, apart from its limit of digits."""
    return b"L" + b"9" * 60_000 + b"L\n."


@attack(PickleRefused)
def is_a_dict_with_colliding_keys() -> bytes:
    """Any pickled dict is refused: its keys are hashed while it is loaded."""
    return pickle.dumps({n * (2**61 - 1): None for n in range(1000)})
