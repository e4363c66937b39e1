"""A receiver written from docs/protocol.md: it fetches states of contiguous tensors that share no memory."""

import http.client
import struct
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any
from urllib.parse import urlsplit

from msgspec import msgpack
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest, xxh3_128_digest, xxh3_128_hexdigest


class Receiver:
    def __init__(self, address: str) -> None:
        url = urlsplit(address)
        self._connection = http.client.HTTPConnection(url.netloc, timeout=10)
        self._headers = {"Authorization": f"Bearer {url.fragment}"}
        self.close = self._connection.close

    def _ask(self, method: str, path: str, expected: int, body: bytes = b"") -> bytes:
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        assert response.status == expected, (response.status, answer)
        return answer

    def fetch(self, name: str = "state", at_once: int = 3) -> tuple[Any, int]:
        """Return the state, each tensor as (dtype, shape, bytes), and its version."""
        request = msgpack.encode({"name": name, "receiver": "second implementation"})
        self._grant = grant = msgpack.decode(self._ask("POST", "/v1/leases", 201, request))
        lease = f"/v1/leases/{grant['lease']}"
        manifest, digests = (self._ask("GET", f"{lease}/{what}", 200) for what in ("manifest", "digests"))
        grant_text = " ".join(str(grant[field]) for field in ("version", "root"))
        assert xxh3_64_hexdigest(manifest + digests + grant_text.encode()) == grant["metadata"]
        announced = struct.unpack(f"<{len(digests) // 8}Q", digests)
        root, self._branches, self._leaves, self._tensors, sizes = msgpack.decode(manifest)
        self._storages = [bytearray(size) for size in sizes]
        self._positions: dict[int, int] = {}
        position = 0
        chunks = list(self._plan())
        assert len(chunks) == len(announced) == grant["chunks"]
        for first in range(0, len(chunks), at_once):
            end = min(first + at_once, len(chunks))
            data = memoryview(self._ask("GET", f"{lease}/chunks/{first}-{end}", 200))
            for number in range(first, end):
                nbytes = sum(size for *_, size in chunks[number])
                assert xxh3_64_intdigest(data[:nbytes]) == announced[number]
                for tensor, offset, size in chunks[number]:
                    self._storages[self._tensors[tensor][4]][offset : offset + size] = data[:size]
                    self._positions.setdefault(tensor, position)
                    position += size
                    data = data[size:]
            assert not data
        self._nodes: list[bytes] = []
        state = self._build(root, [])
        assert xxh3_128_hexdigest(b"".join([*self._nodes, xxh3_128_digest(digests)])) == grant["root"]
        self._ask("POST", f"{lease}/result", 204, msgpack.encode({"outcome": "confirmed"}))
        return state, grant["version"]

    def _plan(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the pieces of each chunk: (tensor, offset, size). Every tensor is one extent, or empty."""
        chunk_bytes, pack_bytes = self._grant["chunk_bytes"], self._grant["pack_bytes"]
        extents = [(n, spec[5], len(self._bytes_of(n))) for n, spec in enumerate(self._tensors)]
        packed: list[list[tuple[int, int, int]]] = [[]]
        for extent in (each for each in extents if 0 < each[2] < pack_bytes):
            if sum(size for *_, size in [*packed[-1], extent]) > max(min(1 << 20, chunk_bytes), pack_bytes):
                packed.append([])
            packed[-1].append(extent)
        yield from filter(None, packed)
        step = chunk_bytes // 16 * 16
        for tensor, start, size in (each for each in extents if each[2] >= max(pack_bytes, 1)):
            cuts = range(start + step, start + size, step) if size > chunk_bytes else ()
            for begin, end in pairwise([start, *cuts, start + size]):
                yield [(tensor, begin, end - begin)]

    def _bytes_of(self, tensor: int) -> bytes:
        _, itemsize, shape, _, storage, offset, *_ = self._tensors[tensor]
        return bytes(self._storages[storage][offset : offset + itemsize * prod(shape)])

    def _build(self, child: int, path: list[Any]) -> Any:
        """Build a leaf or a container, and list its digest and those of its children in `_nodes`."""
        if child < 0:
            kind, children, keys, extra = self._branches[~child]
            self._nodes.append(xxh3_128_digest(msgpack.encode([path, kind, extra])))
            names = range(len(children)) if keys is None else keys
            built = [self._build(each, [*path, name]) for name, each in zip(names, children, strict=True)]
            return built if keys is None else dict(zip(keys, built, strict=True))
        kind, parts, fixed, traits = self._leaves[child]
        described = [self._describe(part) for part in parts]
        content = [path, kind, fixed, traits if kind == "value" else described]
        self._nodes.append(xxh3_128_digest(msgpack.encode(content)))
        return traits if kind == "value" else (*described[0][:2], self._bytes_of(parts[0]))

    def _describe(self, tensor: int) -> list[Any]:
        dtype, _, shape, stride, *_, conj, neg = self._tensors[tensor]
        extents = [[0, self._positions[tensor]]] if tensor in self._positions else []
        return [dtype, shape, stride, conj, neg, extents]
