"""What transfers share: staging buffers, and a cache of what was derived from manifests.

Weights go to an inference engine step after step: the bytes change, and the manifest does not. So what
follows from a manifest alone is kept, keyed by its encoding.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from torchferry.core import codec
from torchferry.core.codec import EncodedManifest, Frame
from torchferry.core.manifest import Manifest
from torchferry.core.plan import WINDOW_BYTES, Plan, make_plan
from torchferry.tensors.assemble import Prepared, prepare
from torchferry.tensors.describe import Description
from torchferry.tensors.kinds import RebuildContext

T = TypeVar("T")

_MAX_ENTRY_BYTES = 8 << 20
"""An entry counts as many bytes as its key has, or more if it is a plan of many chunks. Larger entries are
not kept. The manifest of 131,072 tensors has about that much."""

_MAX_BYTES = 4 * _MAX_ENTRY_BYTES
"""The limit for all entries together. A state has about four, which take about 0.8 KB for each tensor."""

_MIN_ENTRY_BYTES = 1 << 10
_PIECE_BYTES = 48


class Workspace:
    """Shared by the transfers of one transport. Threads may use it at the same time.

    The cache holds immutable data only, and no tensors. Decoded values are not cached, because the caller who
    receives them may modify them.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self._entries: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._nbytes = 0

    def encode(self, manifest: Manifest) -> EncodedManifest:
        """Encode a manifest of this process, and keep it: a peer often sends the same one."""
        encoded = EncodedManifest(manifest, codec.encode_value(manifest))
        return self._get(("manifest", encoded.data), lambda: encoded)

    def with_known_manifest(self, description: Description) -> Description:
        """Return a description whose manifest is the kept one, if an equal manifest is kept."""
        return replace(description, manifest=self.encode(description.manifest).manifest)

    def decode(self, data: bytes) -> tuple[Frame, EncodedManifest]:
        """Decode a frame, except for its manifest if that is kept; raises BadManifest if it is malformed."""

        def decode_manifest(data: bytes) -> Manifest:
            key = ("manifest", data)
            return self._get(key, lambda: EncodedManifest(codec.decode_manifest(data), data)).manifest

        frame = codec.decode(data, decode_manifest)
        return frame, self.encode(frame.manifest)

    def plan(self, encoded: EncodedManifest, *sizes: Any, **more: Any) -> Plan:
        """Plan a transfer as `make_plan` does, with the same arguments after the manifest."""
        # Only the tensors matter: a plan is kept while values, such as a step, change.
        key = ("plan", codec.encode_value(encoded.manifest.tensors), sizes, tuple(more.items()))
        return self._get(key, lambda: make_plan(encoded.manifest, *sizes, **more))

    def prepare(
        self, encoded: EncodedManifest, context: RebuildContext, only: Collection[int] | None = None
    ) -> Prepared:
        """Prepare a manifest as `tensors.assemble.prepare` does. With `only`, nothing is kept."""
        if only is not None:
            return prepare(encoded.manifest, context, only=only)
        return self._get(("prepared", encoded.data, context), lambda: prepare(encoded.manifest, context))

    def _get(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return cast(T, self._entries[key])
        made = make()
        # Values belong to the caller that receives them, and are decoded anew each time.
        has_values = isinstance(made, Prepared) and made.values
        if _cost(key, made) <= _MAX_ENTRY_BYTES and not has_values:
            with self._lock:
                if key not in self._entries:
                    self._nbytes += _cost(key, made)
                self._entries[key] = made
                while self._nbytes > _MAX_BYTES:
                    self._nbytes -= _cost(*self._entries.popitem(last=False))
        return made


def _cost(key: tuple[object, ...], made: object) -> int:
    """Return what an entry counts. A short manifest may have a plan of many chunks, or no tensors at all."""
    key_bytes = sum(len(part) for part in key if isinstance(part, bytes))
    pieces = sum(1 + len(chunk.pieces) for chunk in made.chunks) if isinstance(made, Plan) else 0
    return _MIN_ENTRY_BYTES + max(key_bytes, _PIECE_BYTES * pieces)


_MIN_KEPT_BYTES = 64 << 10
_MAX_KEPT_BYTES = WINDOW_BYTES // 2


class Staging:
    """A pool of buffers that one transfer leaves to the next.

    The kernel maps new memory page by page, which for many small tensors takes a sixth of a transfer's time.
    With `pinned`, buffers on the CPU are page-locked where the system can do that, so that an accelerator
    copies while the link sends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return a flat buffer of exactly this size."""
        pinned = pinned and self._device.type == "cpu"
        with self._lock:
            for index, buffer in enumerate(self._free):
                # A buffer more than twice as large would hold memory that the window does not count.
                if nbytes <= buffer.nbytes <= 2 * nbytes and (not pinned or buffer.is_pinned()):
                    return self._free.pop(index)[:nbytes]
        # The next transfer may use the buffer outside of inference mode.
        with torch.inference_mode(False):
            if pinned:
                # Some accelerators have no pinned memory, and there is little of it.
                with suppress(RuntimeError):
                    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool, unless its transfer failed: the backend may still write to it."""
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(buffer.untyped_storage())
        if whole.nbytes < _MIN_KEPT_BYTES:
            return
        with self._lock:
            self._free.append(whole)
            while sum(free.nbytes for free in self._free) > _MAX_KEPT_BYTES:
                self._free.pop(0)
