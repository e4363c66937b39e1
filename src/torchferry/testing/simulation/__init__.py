"""A deterministic simulation of transfers, with a simulated clock and a random generator by seed.

The real `send_state` and `receive_state` run in it, on a link whose messages are delayed, lost or damaged, in
processes that are stopped and killed, as the seed decides. The same seed gives the same run, event by event.
`scenario.simulate(seed)` runs one scenario and checks the rules that hold for all of them.

`pull.simulate_pull(seed)` does the same for fetches, with the pure rules of `core/` in a simulated engine.
"""

from torchferry.testing.simulation.pull import simulate_pull
from torchferry.testing.simulation.scenario import CheckFailed, simulate

__all__ = ["CheckFailed", "simulate", "simulate_pull"]
