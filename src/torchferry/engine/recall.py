"""What was worked out for one transfer, and need not be again if the next is of a state described alike.

Weights go to an inference engine step after step, and a job whose workers fail sends the same state many
times: the bytes change, and what describes them does not. So what follows from a description alone is kept
from one transfer to the next. It is used again only if all that it follows from is equal, and nothing of the
state itself is in it: no tensor, no memory, no value that a receiver could be given twice.
"""

from __future__ import annotations

from torchferry.core.codec import Known
from torchferry.core.last import Last
from torchferry.core.manifest import Manifest
from torchferry.core.plan import CHUNK_BYTES, PACK_FROM, Plan, make_plan
from torchferry.tensors.storages import Traces

MOST_ITEMS = 1 << 15
"""So many tensors and chunks are kept, some ten megabytes of them."""

MOST_FRAME_BYTES = 4 << 20
"""Nothing is kept of longer metadata: values may be in it, of any size, and decoded it is several times as
long."""


class Recall:
    """What the last transfer in one direction leaves to the next. One transfer has it at a time.

    `traces` are for who describes a state; `arrived` is what a fresh state that arrived was described by.
    """

    def __init__(self) -> None:
        self.traces = Traces()
        self.arrived: Known | None = None
        self._plan: Last[Plan] = Last()
        self._items = 0

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it takes little memory."""
        # The plan may be of what arrived, and the traces of a local state, which has more in it.
        return max(self._items, len(self.traces.specs.answer or ())) <= MOST_ITEMS

    def plan(
        self,
        manifest: Manifest,
        chunk_bytes: int = CHUNK_BYTES,
        pack_bytes: int | None = None,
        pack_from: int = PACK_FROM,
    ) -> Plan:
        """Plan a transfer, as `make_plan` does, or find that it is the last one's plan.

        Raises:
            TooIntricate: views overlap in a pattern too irregular to list.
            TooManyMessages: more than may be listed.
        """
        plan = self._plan.of(
            (manifest.tensors, chunk_bytes, pack_bytes, pack_from),
            lambda: make_plan(manifest, chunk_bytes, pack_bytes, pack_from),
        )
        self._items = len(manifest.tensors) + len(plan.chunks)
        return plan
