"""The benchmark of torchferry: `python -m benchmarks`, and `python -m benchmarks cluster` for several hosts.

`workloads` lists what is measured, with targets; `systems/` has the systems that are compared. `run` is the
measuring loop of every rank, `rounds` is one transfer. `measure` starts the ranks and returns
`results.Results`, which `tables`, `plots` and `document` show.
"""
