"""docs/protocol.md is complete: its tables match the code, and a reader written from it reads a transfer."""

from __future__ import annotations

import http.client
import re
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from tests.support.sizes import examples
from torchferry.core import pull, schedule
from torchferry.core.leases import MAX_LEASES
from torchferry.core.manifest import PICKLED, VALUE, Manifest, TensorSpec
from torchferry.core.plan import MAX_CHUNKS, make_plan
from torchferry.core.pull import FetchState, LeaseState
from torchferry.core.push import MAX_METADATA_BYTES, ReceiverState, SenderState
from torchferry.engine.pull import remote
from torchferry.engine.pull.handler import _LEASE_PATH
from torchferry.engine.push import SendOptions, send_state
from torchferry.engine.sync.coordination import Coordinator
from torchferry.links import http_server, sockets
from torchferry.links.http import MAX_HEAD_BYTES
from torchferry.serving import serve
from torchferry.tensors import containers, kinds
from torchferry.testing import MemoryNetwork

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize(
    ("heading", "states"),
    [
        ("## The states of a sender", SenderState),
        ("## The states of a receiver", ReceiverState),
        ("## The states of a lease", LeaseState),
        ("## The states of a fetch", FetchState),
    ],
    ids=["sender", "receiver", "lease", "fetch"],
)
def test_the_page_has_the_state_tables_of_the_code(heading: str, states: Any) -> None:
    section = re.split(r"\n##? ", PAGE.partition(heading)[2])[0]
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
        assert data[:5] == b"TFRY\x09"
        assert struct.unpack_from("<Q", data, 5)[0] == xxh3_64_intdigest(data[13:])
        body = msgspec.msgpack.decode(data[13:])
        defaults = [None, None, None, 0, b"", None, False, 0, 0, None, b""]
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


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading or a bold line, without its head."""
    lines = PAGE.partition(f"\n{heading}\n")[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| --- |"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def test_the_page_has_every_kind_of_container_and_leaf() -> None:
    parts = {row[0]: row[1] for row in table("## The manifest")}
    branches, leaves = (
        parts[part].partition("kinds: ")[2].partition(".")[0].split(", ") for part in ("branches", "leaves")
    )
    assert sorted(branches) == sorted(containers._builds)
    assert sorted(leaves) == sorted([*kinds._by_name, "dtensor", "sharded", VALUE, PICKLED])


MESSAGES = [pull.LeaseRequest, pull.Grant, pull.Peer, pull.InMemory, pull.Result, pull.Failure]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_page_has_the_fields_of_every_message(message: type[msgspec.Struct]) -> None:
    written = [(row[0], row[2]) for row in table(f"**{message.__name__}**")]
    shown = {"None": "nil", "''": '""', "True": "true", "False": "false", "()": "[]"}
    fields = msgspec.structs.fields(message)
    assert written == [
        (
            field.name,
            "" if field.default is msgspec.NODEFAULT else shown.get(repr(field.default), repr(field.default)),
        )
        for field in fields
    ]


def test_the_page_has_every_status() -> None:
    section = PAGE.partition("\n## Requests\n")[2].partition("\n## ")[0]
    written = {int(status) for status in re.findall(r"^\| (\d{3}) \|", section, re.MULTILINE)}
    names = (
        "OK",
        "GRANTED",
        "IN_MEMORY",
        "NOTHING",
        "BAD_REQUEST",
        "UNAUTHORIZED",
        "UNKNOWN",
        "CHANGED",
        "LEASE_ENDED",
    )
    assert written == {getattr(pull, name) for name in (*names, "UNREADABLE")} | {503}


def test_the_page_has_the_limits_of_the_code() -> None:
    written = dict(table("## Limits"))
    assert written == {
        "head of a request or answer": f"{MAX_HEAD_BYTES >> 10} KiB",
        "body of a request": f"{http_server.MAX_REQUEST_BYTES >> 10} KiB; "
        f"{Coordinator.max_request_bytes >> 30} GiB for `/v1/sync`",
        "answer that is neither metadata nor chunks": f"{remote._MAX_ANSWER_BYTES >> 10} KiB",
        "manifest, at the receiver": f"{MAX_METADATA_BYTES >> 20} MiB by default",
        "digests, at the receiver": "8 bytes for each of `chunks`",
        "chunks of a plan": f"{MAX_CHUNKS:,}",
        "first request of a connection, with its token": f"within {http_server.PENDING_S:g} s",
        "connections without a token": f"{http_server.MAX_PENDING}; the oldest is closed for the next",
        "connections with a token": f"{http_server.MAX_CONNECTIONS:,} for each token; then 503. "
        "No limit for `/v1/sync`",
        "wait for the next request of a connection": f"{http_server.IDLE_S:g} s; "
        f"{Coordinator.idle_s:,.0f} s for `/v1/sync`",
        "wait for a receiver to take bytes": f"{http_server.SEND_S:g} s",
        "wait for a newer version, for one request": f"{pull.MAX_WAIT_S:g} s",
        "lease without a request or a sent chunk": f"{pull.LEASE_S:g} s",
        "connecting to an address": f"{sockets.LOST_S} s; {schedule.OVERDUE_S:g} s if another source serves",
        "TCP connection whose other end acknowledges nothing": f"lost after {sockets.LOST_S} s "
        f"at a client, {sockets.SERVER_LOST_S} s at a server. "
        "The kernel of each end probes it while it is silent",
        "open leases": f"{MAX_LEASES:,}; then 410",
    }
    assert f"after {pull.LEASE_S:g} s in which the source neither" in PAGE
    assert f"it waits at most {pull.MAX_WAIT_S:g} s" in PAGE
    assert f"sends `alive` every {pull.ALIVE_S:g} s" in PAGE
    assert f"this version, at most {pull.MAX_PEERS};" in PAGE
    assert f"16 bytes to {pull.MAX_PULL_CHUNK_BYTES >> 20} MiB" in PAGE
    assert pull.PULL_CHUNK_BYTES == 1 << 20, "normally 1 MiB"


def test_a_source_answers_every_request_of_the_page_as_the_page_says() -> None:
    requests = [re.findall(r"`(\w+) (/\S+)`", row[0])[0] for row in table("## Requests")]
    answers = [int(row[2][:3]) for row in table("## Requests")]
    assert requests[0] == ("POST", "/v1/leases")
    kinds = {path.split("/")[4] for _, path in requests[1:]}
    assert kinds == {*re.findall(r"[a-z]{5,}", _LEASE_PATH.pattern.partition("/v1/leases/")[2])}
    bodies = {
        "/v1/leases": msgspec.msgpack.encode({"name": "state", "receiver": "the page"}),
        "result": msgspec.msgpack.encode({"outcome": "failed", "reason": "a test"}),
    }
    lease, root = "", ""
    with serve({"w": torch.ones(3)}, version=7) as source:
        url = urlsplit(source.address)
        connection = http.client.HTTPConnection(url.netloc, timeout=10)
        for (method, path), status in zip(requests, answers, strict=True):
            path = path.replace("LEASE", lease).replace("FIRST-END", "0-1")
            body = bodies.get(path, bodies.get(path.rpartition("/")[2], b""))
            connection.request(method, path, body, {"Authorization": f"Bearer {url.fragment}"})
            response = connection.getresponse()
            answer = response.read()
            assert response.status == status, (method, path, answer)
            if status == pull.GRANTED:
                grant = msgspec.msgpack.decode(answer)
                lease, root = grant["lease"], grant["root"]
            assert (response.headers["ETag"] == f'"{root}"') == (status == pull.OK)
        connection.close()
        assert [reader.state for reader in source.status().readers] == ["failed"]


Extent = tuple[int, int, tuple[tuple[int, int], ...]]
"""offset, run, ((count, step), …) with the widest step first; as the page describes extents."""


Origin = tuple[int, int]
"""The number and the item size of a tensor that an extent was merged from."""

Merged = tuple[Extent, list[Origin]]


class PagePlan:
    """The extents and chunks of one storage, computed as the page says."""

    def __init__(self, tensors: list[TensorSpec], chunk_bytes: int, pack_bytes: int) -> None:
        used = [
            (extent, (n, spec.itemsize)) for n, spec in enumerate(tensors) for extent in self.runs_of(spec)
        ]
        merged = sorted(self.merge(used), key=lambda each: (min(each[1])[0], each[0][0]))
        extents = [extent for extent, _ in merged]
        limit = max(min(1 << 20, chunk_bytes), pack_bytes)
        packed: list[list[Extent]] = []
        for extent in extents:
            if self.nbytes(extent) < pack_bytes:
                if not packed or sum(map(self.nbytes, packed[-1])) + self.nbytes(extent) > limit:
                    packed.append([])
                packed[-1].append(extent)
        self.chunks = packed
        for extent, origins in merged:
            if self.nbytes(extent) >= pack_bytes:
                item_bytes = max(size for _, size in origins)
                self.chunks += [[piece] for piece in self.split(extent, chunk_bytes, item_bytes)]

    def nbytes(self, extent: Extent) -> int:
        return sum(end - start for start, end in self.listed(extent))

    def listed(self, extent: Extent) -> list[tuple[int, int]]:
        """The runs of an extent, in order of address."""
        offset, run, repeats = extent
        starts = (
            offset + sum(n * step for n, (_, step) in zip(at, repeats, strict=True))
            for at in product(*(range(count) for count, _ in repeats))
        )
        return sorted((start, start + run) for start in starts)

    def joined(self, runs: list[tuple[int, int]], *, touching: bool) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for start, end in sorted(runs):
            if found and (start < found[-1][1] or (touching and start == found[-1][1])):
                found[-1] = found[-1][0], max(found[-1][1], end)
            else:
                found.append((start, end))
        return found

    def sequences(self, runs: list[tuple[int, int]]) -> Iterator[Extent]:
        while runs:
            (start, end), step = runs[0], runs[1][0] - runs[0][0] if len(runs) > 1 else 0
            count = 1
            while count < len(runs) and runs[count] == (start + count * step, end + count * step):
                count += 1
            yield start, end - start, ((count, step),) if count > 1 else ()
            runs = runs[count:]

    def runs_of(self, spec: TensorSpec) -> list[Extent]:
        if 0 in spec.shape:
            return []
        dims = sorted((step * spec.itemsize, n) for step, n in zip(spec.stride, spec.shape, strict=True))
        steps = [(count, step) for step, count in dims if count > 1 and step > 0]
        run = span = spec.itemsize
        repeats: list[tuple[int, int]] = []
        for count, step in steps:
            if not repeats and step <= run:
                run += (count - 1) * step
            elif step < span:
                everything = self.listed((spec.offset, spec.itemsize, tuple(steps)))
                return list(self.sequences(self.joined(everything, touching=True)))
            elif repeats and step == repeats[0][0] * repeats[0][1]:
                repeats[0] = count * repeats[0][0], repeats[0][1]
            else:
                repeats.insert(0, (count, step))
            span += (count - 1) * step
        return [(spec.offset, run, tuple(repeats))]

    def merge(self, used: list[tuple[Extent, Origin]]) -> Iterator[Merged]:
        groups: list[dict[Extent, list[Origin]]] = []
        end = 0
        for extent, origin in sorted(used, key=lambda each: (each[0][0], -self.listed(each[0])[-1][1])):
            if not groups or extent[0] >= end:
                groups.append({})
            groups[-1].setdefault(extent, []).append(origin)
            end = max(end, self.listed(extent)[-1][1])
        for group in groups:
            for merged, members in self.merge_group(list(group)):
                yield merged, [origin for each in members for origin in group[each]]

    def merge_group(self, group: list[Extent]) -> Iterator[tuple[Extent, list[Extent]]]:
        """Yield extents, and which of the group each was merged from."""
        if len(group) == 1:
            yield group[0], group
            return
        runs = self.joined([(o, o + run) for o, run, repeats in group if not repeats], touching=False)
        repeated = [
            each
            for each in group
            if each[2] and not any(s <= each[0] and self.listed(each)[-1][1] <= e for s, e in runs)
        ]
        if not repeated:
            yield from (((start, end - start, ()), group) for start, end in runs)
            return
        if not runs and len({repeats for _, _, repeats in repeated}) == 1:
            columns = self.joined([(offset, offset + run) for offset, run, _ in repeated], touching=False)
            span, interleaves = columns[-1][1] - columns[0][0], False
            for count, step in reversed(repeated[0][2]):
                interleaves |= step < span
                span += (count - 1) * step
            if not interleaves:
                for start, end in columns:
                    joined = [each for each in group if start <= each[0] < end]
                    yield (start, end - start, repeated[0][2]), joined
                return
        everything = runs + [run for each in repeated for run in self.listed(each)]
        yield from ((each, group) for each in self.sequences(self.joined(everything, touching=True)))

    def split(self, extent: Extent, chunk_bytes: int, item_bytes: int) -> Iterator[Extent]:
        offset, run, repeats = extent
        if self.nbytes(extent) <= chunk_bytes:
            yield extent
        elif not repeats:
            step = chunk_bytes // 16 * 16
            cuts = range(offset // item_bytes * item_bytes + step, offset + run, step)
            for start, end in zip([offset, *cuts], [*cuts, offset + run], strict=True):
                yield start, end - start, ()
        else:
            (count, step), inner = repeats[0], repeats[1:]
            rows = max(chunk_bytes * count // self.nbytes(extent), 1)
            for first in range(0, count, rows):
                outer = ((min(rows, count - first), step),) if min(rows, count - first) > 1 else ()
                yield from self.split((offset + first * step, run, outer + inner), chunk_bytes, item_bytes)


@st.composite
def tensor_specs(draw: st.DrawFn) -> TensorSpec:
    itemsize = draw(st.sampled_from([1, 4]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    stride = tuple(draw(st.sampled_from([0, 1, 2, 3, 5, 8, 25])) for _ in shape)
    return TensorSpec("any", itemsize, shape, stride, 0, draw(st.integers(0, 20)) * itemsize)


@examples(1000)
@given(st.lists(tensor_specs(), max_size=3), st.sampled_from([16, 20, 64]), st.sampled_from([0, 8, 16]))
def test_a_plan_that_is_computed_as_the_page_says_has_the_chunks_of_the_code(
    tensors: list[TensorSpec], chunk_bytes: int, pack_bytes: int
) -> None:
    plan = make_plan(Manifest(0, (), (), tuple(tensors), (4096,)), chunk_bytes, pack_bytes)
    page = PagePlan(tensors, chunk_bytes, pack_bytes)
    expected = [[run for piece in chunk for run in page.listed(piece)] for chunk in page.chunks]
    found = [
        [run for piece in chunk.pieces for run in page.listed((piece.offset, piece.run_bytes, piece.repeats))]
        for chunk in plan.chunks
    ]
    assert found == expected
