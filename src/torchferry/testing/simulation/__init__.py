"""The protocol in a world of its own: a clock that only moves when nothing else can, and chance by seed.

The real `push` and `pull` run in it, on a link whose messages are delayed, lost, damaged or misled and whose
processes are stopped and killed, as a seed decides. The same seed gives the same run, to the last event.
`scenario.simulate(seed)` plays one and checks what must hold in all of them.
"""

from torchferry.testing.simulation.scenario import Broken, simulate

__all__ = ["Broken", "simulate"]
