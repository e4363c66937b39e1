"""docs/protocol.md is complete: its tables match the code, and a reader written from it reads a transfer."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from xxhash import xxh3_64_intdigest

from torchferry.core.push import MAX_METADATA_BYTES, ReceiverState, SenderState
from torchferry.engine import SendOptions, send_state
from torchferry.testing import MemoryNetwork

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize(
    ("heading", "states"),
    [("## The states of a sender", SenderState), ("## The states of a receiver", ReceiverState)],
    ids=["sender", "receiver"],
)
def test_the_page_has_the_state_tables_of_the_code(heading: str, states: Any) -> None:
    section = PAGE.partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| ([\w, ]*)\|$", section, re.MULTILINE)
    written = {state: {each.strip() for each in after.split(",") if each.strip()} for state, after in rows}
    del written["state"]
    assert written == {state.label: set(state.following) for state in states}


class Reader:
    """Reads one transfer of contiguous tensors from rank 0 to rank 1, as docs/protocol.md describes it."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        (length,) = struct.unpack("<q", self._read(0x54460000))
        data = self._read(0x54460001)
        assert len(data) == length
        assert data[:5] == b"TFRY\x07"
        assert struct.unpack_from("<Q", data, 5)[0] == xxh3_64_intdigest(data[13:])
        body = msgspec.msgpack.decode(data[13:])
        defaults = [None, None, None, 0, b"", None, False, 0, 0, None]
        self.body = [*body, *defaults[len(body) :]]
        self._number = 0

    def _read(self, tag: int) -> bytes:
        message = self._network.get((0, 1, tag), 1.0)
        return bytes(message.view(torch.uint8).tolist())

    def _next(self) -> bytes:
        serial, origin = self.body[3], self.body[8]
        slot = (origin % 256) * 512 + serial % 512
        self._number += 1
        return self._read(0x54460010 + slot * 4096 + (self._number - 1) % 4096)

    def chunk_sizes(self) -> list[int]:
        """The sizes of the chunks. Every tensor is one extent here."""
        chunk_bytes, pack_bytes = self.body[1], self.body[7]
        sizes = [self.body[0][4][spec[4]] for spec in self.body[0][3]]
        limit = max(min(1 << 20, chunk_bytes), pack_bytes)
        chunks: list[int] = []
        for size in (size for size in sizes if size < pack_bytes):
            if chunks and chunks[-1] + size <= limit:
                chunks[-1] += size
            else:
                chunks.append(size)
        step = chunk_bytes // 16 * 16
        for size in (size for size in sizes if size >= pack_bytes):
            chunks += [min(step, size - start) for start in range(0, size, step)]
        return chunks

    def payload(self) -> tuple[list[bytes], bool]:
        """The chunks, verified, and whether the state changed."""
        digests, changed = self.body[5], False
        chunks: list[bytes] = []
        sizes = self.chunk_sizes()
        blocks = [(first, min(first + 64, len(sizes))) for first in range(0, len(sizes), 64)]
        for number, size in enumerate(sizes):
            chunks.append(self._next())
            assert len(chunks[-1]) == size
            is_last = number + 1 == len(sizes)
            while self.body[6] and blocks and (blocks[0][1] + 7 == number or is_last):
                start, end = blocks.pop(0)
                block = self._next()
                assert len(block) == max(24 + 8 * (end - start), 40)
                assert block[:16] == self.body[4]
                flag, *found = struct.unpack_from(f"<{end - start + 1}Q", block, 16)
                changed |= bool(flag)
                assert found == [xxh3_64_intdigest(chunk) for chunk in chunks[start:end]]
        if digests is not None:
            assert digests == [xxh3_64_intdigest(chunk) for chunk in chunks]
        return chunks, changed


STATES = {
    "small": {f"t{n}": torch.arange(n + 1) for n in range(5)},
    "packed": {f"t{n}": torch.full((100 + n,), n, dtype=torch.int32) for n in range(3000)},
    "large": {"a": torch.arange(1 << 20), "b": torch.arange(3)},
    "many chunks": {f"t{n}": torch.full((1 << 15,), n) for n in range(150)},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_reader_that_knows_only_the_page_reads_a_transfer(state: dict[str, torch.Tensor]) -> None:
    network = MemoryNetwork()
    options = SendOptions(10, MAX_METADATA_BYTES, step=7, chunk_bytes=1 << 18)
    send_state(network.link(0), [1], state, options)
    reader = Reader(network)
    chunks, changed = reader.payload()
    small = [t for t in state.values() if t.nbytes < reader.body[7]]
    large = [t for t in state.values() if t.nbytes >= reader.body[7]]
    assert b"".join(chunks) == b"".join(bytes(t.view(torch.uint8).tolist()) for t in (*small, *large))
    assert (reader.body[2], changed) == (7, False)
    assert not any(network._boxes.values()), "messages are left that the page does not describe"
