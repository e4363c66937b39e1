"""What one transfer leaves to the next: staging buffers, and what was derived from manifests.

Weights go to an inference engine step after step: the bytes change, and the manifest does not. So what
follows from a manifest alone is kept, keyed by its encoding.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from msgspec import structs

from torchferry.core import codec
from torchferry.core.codec import EncodedManifest, Frame
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan, make_plan
from torchferry.engine.staging import Staging
from torchferry.tensors.assemble import Prepared, prepare
from torchferry.tensors.describe import Description
from torchferry.tensors.kinds import RebuildContext

T = TypeVar("T")

_MAX_KEY_BYTES = 8 << 20
"""Nothing is kept of longer encodings. A state of 131,072 tensors has about that much."""

_MAX_BYTES = 4 * _MAX_KEY_BYTES
"""How long all keys may be together. A state has about four times its encoding as keys, and what is kept of
it takes about 0.8 KB for each tensor."""

_MIN_KEY_BYTES = 1 << 10


class Workspace:
    """Shared by the transfers of one transport. Threads may use it at the same time.

    Nothing in it refers to tensors or their memory, and no value in it is given to two callers, except keys,
    which can't be changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self._entries: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._nbytes = 0

    def encode(self, manifest: Manifest) -> EncodedManifest:
        """Encode a manifest of this process, and keep its parts: a peer often sends the same ones."""
        encoded = codec.encode_manifest(manifest)
        for name, data in zip(codec.PARTS, encoded.parts, strict=True):
            self._get((name, data), lambda name=name: getattr(manifest, name))  # type: ignore[misc]
        return self._get(("manifest", *encoded.key), lambda: encoded)

    def with_known_manifest(self, description: Description) -> Description:
        """Return a description whose manifest is the kept one, if an equal manifest is kept."""
        return replace(description, manifest=self.encode(description.manifest).manifest)

    def decode(self, data: bytes) -> tuple[Frame, EncodedManifest]:
        """Decode a frame, except for parts of its manifest that are kept.

        Raises:
            BadManifest: the frame is malformed.
        """
        body = codec.decode_body(data)
        packed = body.manifest
        key = ("manifest", packed.root, *(bytes(getattr(packed, name)) for name in codec.PARTS))
        encoded = self._get(key, lambda: codec.decode_manifest(packed, self._decode_part))
        return cast(Frame, structs.replace(body, manifest=encoded.manifest)), encoded

    def _decode_part(self, name: str, data: bytes) -> Any:
        return self._get((name, data), lambda: codec.decode_part(name, data))

    def plan(self, encoded: EncodedManifest, *sizes: Any, **more: Any) -> Plan:
        """Plan a transfer as `make_plan` does, with the same arguments after the manifest.

        Raises:
            TooIrregular: views overlap in a pattern too irregular to list.
            TooManyMessages: the plan has too many messages.
        """
        key = ("plan", encoded.parts[codec.PARTS.index("tensors")], sizes, tuple(more.items()))
        return self._get(key, lambda: make_plan(encoded.manifest, *sizes, **more))

    def prepare(self, encoded: EncodedManifest, context: RebuildContext) -> Prepared:
        """Prepare a manifest as `tensors.assemble.prepare` does.

        Raises:
            PeerError: this process can't build the state.
        """
        # Values belong to the caller that receives them, and are decoded anew each time.
        return self._get(
            ("prepared", *encoded.key),
            lambda: prepare(encoded.manifest, context),
            keep=lambda prepared: not prepared.values,
        )

    def _get(
        self, key: tuple[object, ...], make: Callable[[], T], keep: Callable[[T], bool] = lambda made: True
    ) -> T:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return cast(T, self._entries[key])
        made = make()
        if _key_bytes(key) <= _MAX_KEY_BYTES and keep(made):
            with self._lock:
                if key not in self._entries:
                    self._nbytes += _key_bytes(key)
                self._entries[key] = made
                while self._nbytes > _MAX_BYTES:
                    self._nbytes -= _key_bytes(self._entries.popitem(last=False)[0])
        return made


def _key_bytes(key: tuple[object, ...]) -> int:
    # A state without tensors has short keys too.
    return _MIN_KEY_BYTES + sum(len(part) for part in key if isinstance(part, bytes))
