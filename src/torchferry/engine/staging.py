"""Buffers for messages that can't be sent or received where their bytes are."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from torchferry.core.plan import WINDOW_BYTES

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
                # A buffer for much smaller messages would keep more memory than is in flight.
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
        """Return a buffer that is not used any more. A failed transfer keeps its buffers: the backend may
        still write to them.
        """
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(buffer.untyped_storage())
        if whole.nbytes < _MIN_KEPT_BYTES:
            return
        with self._lock:
            self._free.append(whole)
            while sum(free.nbytes for free in self._free) > _MAX_KEPT_BYTES:
                self._free.pop(0)
