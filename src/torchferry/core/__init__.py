"""Pure Python: descriptions of a state and their encoding, plans, comparison, and the protocols.

No torch, clock, randomness, threads, logging or I/O. The same input always gives the same result, so the
tests can run many thousands of cases.
"""
