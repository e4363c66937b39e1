"""Pickle, and how little of it is let in. No other module may import it.

Metadata in another encoding than ours is taken for a pickle. Unless the caller allows pickle, it is read
opcode by opcode first, and refused if any of them could import, construct or call. What is left is data,
which `pickle.loads` can do nothing with but build it, and which is then thrown away unless it is a
description of a state.
"""

from __future__ import annotations

import pickle
import pickletools

from torchferry.core.codec import Envelope, Known, decode, is_frame
from torchferry.errors import BadManifest, FerryError, PickleRefused, Unsendable
from torchferry.pg_transport.contract import ContractStateMeta, to_envelope

MOST_OPCODES_BYTES = 1 << 16
"""How far a pickle is read to find out whether it is plain data. No honest sender's is, so no more is worth
the time: a frame of the greatest length would take minutes to read, and gigabytes to load."""

# Opcodes that build plain data. Everything that is not listed is refused: what names a global, calls,
# builds an instance, asks for a persistent or out-of-band object; what makes the unpickler set aside
# memory by a number in the frame (PUT with a given index, BYTEARRAY8); and what makes it hash (dict items,
# sets), for a hundred bytes of tuples in tuples, each twice the same, take longer than anybody lives.
# fmt: off
_DATA = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "MEMOIZE", "BINPUT", "GET", "BINGET",
    "LONG_BINGET",
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_DICT", "EMPTY_SET",
})
# fmt: on


def dump_leaf(value: object) -> bytes:
    """Pickle a leaf that nothing else can carry.

    Raises:
        Unsendable: pickle can't either.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise Unsendable(f"a {type(value).__qualname__} can't be pickled either: {error}") from None


def load_leaf(data: bytes) -> object:
    """Unpickle a leaf. Runs whatever the sender put there: only for peers that are trusted.

    Raises:
        BadManifest: it is not a pickle, or names something that is not here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise BadManifest(f"a pickled leaf can't be loaded here: {error!r}") from error


def decode_any(frame: bytes, known: Known | None = None, *, allow_pickle: bool) -> Envelope:
    """Decode metadata in our encoding, or in that of torch's PGTransport as far as that is safe or allowed.

    `known` is what the local state would look like in ours.

    Raises:
        PickleRefused: it is a pickle that could run code, and pickle is not allowed.
        BadManifest: it is neither.
    """
    if is_frame(frame):
        return decode(frame, known)
    if not allow_pickle:
        refuse_code(frame)
    try:
        meta = pickle.loads(frame)
    except Exception as error:
        raise BadManifest(
            f"the peer's metadata is neither torchferry's nor a pickle ({error}); is it a torchferry "
            "sender, of the same version?"
        ) from None
    if not isinstance(meta, ContractStateMeta):
        raise BadManifest(f"the peer's metadata is a pickled {type(meta).__qualname__}, not a state's")
    try:
        return to_envelope(meta)
    except FerryError as error:
        raise BadManifest(f"the peer's pickled metadata does not describe a state: {error.what}") from None
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise BadManifest(f"the peer's pickled metadata does not describe a state: {error}") from None


def refuse_code(frame: bytes) -> None:
    """Read a pickle without loading it, up to its end or to a byte that is no opcode.

    Loading stops at such a byte too, so what comes after it never runs. Any other trouble in reading is
    a refusal: the unpickler may understand more than this reader does, and go on past the place.

    Raises:
        PickleRefused: an opcode in it is not plain data, or can't be read, or it is too long.
    """
    try:
        for opcode, _, at in pickletools.genops(frame):
            if at is not None and at > MOST_OPCODES_BYTES:
                raise PickleRefused(
                    f"the peer's metadata looks like a pickle of {len(frame)} bytes, which is too long to "
                    "find out whether it could run code; nothing of it was loaded. Send with torchferry, or "
                    "set allow_pickle=True where the sender is trusted"
                )
            if opcode.name not in _DATA:
                raise PickleRefused(
                    f"the peer's metadata is a pickle with the opcode {opcode.name} at byte {at}, "
                    "which could run code here, or run for ever; nothing of it was loaded. Send with "
                    "torchferry, or set allow_pickle=True where the sender is trusted"
                )
    except (ValueError, UnicodeError, OverflowError) as error:
        # Only this message of genops begins so; the others may quote the frame, but not at their start.
        if not str(error).startswith("at position "):
            raise PickleRefused(
                f"the peer's metadata looks like a pickle, but can't be read ({error}); nothing of it "
                "was loaded"
            ) from None
