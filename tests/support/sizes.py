"""The size of tests with random input: small in the quick set (`make test`), full otherwise.

`make test` sets TEST_SET=quick and deselects the tests marked `slow`. `make test-all` and a plain `pytest`
run the full set.
"""

from __future__ import annotations

import os

from hypothesis import settings

QUICK = os.environ.get("TEST_SET") == "quick"


def count(variable: str, *, full: int, quick: int) -> int:
    """Return the number in an environment variable; by default `full`, or `quick` in the quick set."""
    return int(os.environ.get(variable, quick if QUICK else full))


def examples(full: int) -> settings:
    """Return hypothesis settings for `full` examples; a fifth of them in the quick set, but at least 10."""
    return settings(max_examples=max(full // 5, 10) if QUICK else full)
