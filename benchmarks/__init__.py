"""`torchferry bench`: torchferry and its peers, side by side, with what must be reached and what was.

What is measured is data (`works`), by whom it is done are small adapters (`systems/`). Every rank runs the
same loop (`run`), whether this command has started it (`crew`) or torchrun has. What comes out is one value
(`results.Results`), and the terminal, the page, the JSON file and docs/benchmarks.md are views of it.
"""
