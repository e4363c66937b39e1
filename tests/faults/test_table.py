"""The page of promises is the one that the tests would write."""

from __future__ import annotations

from tests.faults.table import PAGE, render


def test_docs_faults_md_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run scripts/fault_table.py"
