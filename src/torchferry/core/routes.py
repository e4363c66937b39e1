"""Who passes the payload on to whom, when it goes to several receivers.

The sender gives every receiver its header itself. The payload goes either from the sender to each, or along a
chain: the sender to the first, each receiver to the next as the pieces arrive. Along a chain the sender's
line carries the state once, whatever the number of receivers; but whoever comes after a receiver depends on
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from torchferry.core.manifest import Count


class Route(Struct, frozen=True, array_like=True):
    """Where one receiver's payload comes from, and whom it forwards it to.

    `before` has those whom the source itself has it through, the nearest first, without the sender.
    """

    source: Count
    next: Count | None = None
    before: tuple[Count, ...] = ()


def chain(origin: int, receivers: Sequence[int]) -> dict[int, Route]:
    """Give each receiver its route along a chain, in the order given.

    >>> chain(0, [4, 2])
    {4: Route(source=0, next=2, before=()), 2: Route(source=4, next=None, before=())}
    """
    sources = (origin, *receivers)
    followers = (*receivers[1:], None)
    return {
        receiver: Route(source, follower, tuple(reversed(receivers[: max(place - 1, 0)])))
        for place, (receiver, source, follower) in enumerate(zip(receivers, sources, followers, strict=False))
    }
