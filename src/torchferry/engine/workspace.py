"""What transfers share: staging buffers, and a cache of what was derived from manifests."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

from torchferry.core.plan import WINDOW_BYTES

T = TypeVar("T")

_MAX_ENTRY_BYTES = 8 << 20
"""An entry counts as many bytes as its key has, or as its maker says. Larger entries are not kept. The
manifest of 131,072 tensors has about that much."""

_MAX_BYTES = 4 * _MAX_ENTRY_BYTES
"""The limit for all entries together. A state has about four, which take about 0.8 KB for each tensor."""

_MIN_ENTRY_BYTES = 1 << 10
"""What an entry counts at least: a state without tensors has short keys too."""


class Workspace:
    """Shared by the transfers of one transport. Threads may use it at the same time.

    `digests` has those of memory that does not change as long as the workspace is used, by address and size.
    """

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self.cache = Cache()
        self.digests: dict[tuple[int | None, int], int] = {}


class Cache:
    """Immutable data by key, and no tensors. The entries that were used last are kept."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[object, ...], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._nbytes = 0

    def get(
        self, key: tuple[object, ...], make: Callable[[], T], nbytes: Callable[[T], int] = lambda made: 0
    ) -> T:
        """Return the entry of a key, or make it. `nbytes` returns what it counts, if that exceeds its key."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return cast(T, self._entries[key][0])
        made = make()
        key_bytes = sum(len(part) for part in key if isinstance(part, bytes))
        cost = max(_MIN_ENTRY_BYTES, key_bytes, nbytes(made))
        if cost <= _MAX_ENTRY_BYTES:
            with self._lock:
                if key not in self._entries:
                    self._nbytes += cost
                    self._entries[key] = made, cost
                while self._nbytes > _MAX_BYTES:
                    self._nbytes -= self._entries.popitem(last=False)[1][1]
        return made


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
