"""docs/faults.md matches the fault tests."""

from __future__ import annotations

from tests.faults.table import PAGE, render


def test_docs_faults_md_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "docs/faults.md is out of date: run scripts/fault_table.py"
