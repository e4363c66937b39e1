"""What was worked out for one transfer, and need not be again if the next is of a state described alike.

Weights go to an inference engine step after step, and a job whose workers fail sends the same state many
times: the bytes change, and what describes them does not. So a description, and what follows from it alone,
is kept from one transfer to the next. It is used again only if all that it follows from is equal, and no
tensor and no memory is in it, and values only as they travel: no receiver is given one that another has, but
for keys, which can't be changed.
"""

from __future__ import annotations

from dataclasses import replace

from torchferry.core.codec import Known, know
from torchferry.core.last import Last
from torchferry.core.manifest import Manifest
from torchferry.core.plan import CHUNK_BYTES, PACK_FROM, Plan, make_plan
from torchferry.tensors.assemble import Prepared, prepare
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import Layout
from torchferry.tensors.kinds import RebuildContext
from torchferry.tensors.storages import Traces

MOST_ITEMS = 1 << 19
"""So many tensors, chunks, leaves, containers and keys are kept: four for most tensors, which take a kilobyte
together, about as much as torch itself has beside a tensor's bytes."""

MOST_FRAME_BYTES = 8 << 20
"""Nothing is kept of longer metadata: values may be in it, of any size, and what is kept of them is several
times as long."""


class Recall:
    """What the last transfer in one direction leaves to the next. One transfer has it at a time.

    `traces` are for who describes a state; `arrived` is what a fresh state that arrived was described by.
    """

    def __init__(self) -> None:
        self.traces = Traces()
        self.arrived: Known | None = None
        self._known: Known | None = None
        self._prepared: Prepared | None = None
        self._layout: Layout | None = None
        self._plan: Last[Plan] = Last()
        self._items = 0

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it takes little memory."""
        # The plan may be of what arrived, and the rest of a local state, which has more in it.
        if self._known is None:
            return self._items <= MOST_ITEMS
        items = max(self._items, _count(self._known.manifest))
        return items <= MOST_ITEMS and self._known.nbytes <= MOST_FRAME_BYTES

    def know(self, described: Description) -> tuple[Description, Known]:
        """Pack the manifest of what was described with `traces`; it is the last one's, if it is the same."""
        self._known = know(described.manifest, self._known)
        if self._known.manifest is not described.manifest:
            described = replace(described, manifest=self._known.manifest)
        return described, self._known

    def prepare(self, manifest: Manifest, site: RebuildContext) -> Prepared:
        """Prepare a manifest for being built, as `prepare` does, unless that was done for the last one.

        Raises:
            PeerError: it can't be built here.
        """
        if self._prepared is None or self._prepared.manifest is not manifest:
            prepared = prepare(manifest, site)
            # Values are whoever's who gets them, and are made anew each time.
            self._prepared = None if prepared.values else prepared
            return prepared
        return self._prepared

    def layout(self, manifest: Manifest) -> Layout:
        """Give the layout of a manifest that arrives fresh: the last one's, if it is that."""
        if self._layout is None or self._layout.manifest is not manifest:
            self._layout = Layout(manifest)
        return self._layout

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
        self._items = _count(manifest) + len(plan.chunks)
        return plan


def _count(manifest: Manifest) -> int:
    keys = sum(len(branch.keys or ()) for branch in manifest.branches)
    return len(manifest.tensors) + len(manifest.leaves) + len(manifest.branches) + keys
