"""The benchmark of torchferry: `python -m benchmarks`, and `python -m benchmarks cluster` for several hosts.

`workloads` says what is measured, with which `targets`; `systems/` has the systems that are compared. `run`
is the measuring loop of every rank, and `rounds` is one transfer. `measure` starts the ranks and returns
`results.Results`. `document` and `plots` show them.
"""
