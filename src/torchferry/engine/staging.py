"""Memory for messages that can't be sent or received where their bytes lie."""

from __future__ import annotations

from contextlib import suppress

import torch

from torchferry.core.plan import WINDOW_BYTES


class Staging:
    """Buffers for what can't be sent or received where it lies.

    They are used again, because fresh memory has to be faulted in, page by page, which for many small tensors
    takes a sixth of a transfer's time. Only for messages of about their size, and only so many are kept, or
    they would add up to far more than is under way.

    With `pinned` they are page-locked, where the system has that: what is on an accelerator is then copied by
    it, while the link sends or receives the messages before.
    """

    _WORTH_KEEPING_BYTES = 64 << 10
    _KEPT_BYTES = WINDOW_BYTES // 2

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        self.device = device
        self.pinned = pinned and device.type == "cpu"
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Give a flat buffer of exactly this size."""
        for index, buffer in enumerate(self._free):
            if nbytes <= buffer.nbytes <= 2 * nbytes:
                return self._free.pop(index)[:nbytes]
        # Whatever mode the caller is in: the next who writes to it may be in another.
        with torch.inference_mode(False):
            return self._new(nbytes)

    def _new(self, nbytes: int) -> torch.Tensor:
        if self.pinned:
            # Not every accelerator has it, and there is only so much of it.
            with suppress(RuntimeError):
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nothing uses any more."""
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(buffer.untyped_storage())
        if whole.nbytes < self._WORTH_KEEPING_BYTES:
            return
        self._free.append(whole)
        while sum(free.nbytes for free in self._free) > self._KEPT_BYTES:
            self._free.pop(0)
