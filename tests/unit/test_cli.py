"""The `torchferry` command: help, version, and errors for what it does not know."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from torchferry import __version__, cli


def invoke(*arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of `torchferry` with these arguments."""
    result = CliRunner().invoke(
        cli._build_app(), arguments, prog_name="torchferry", env={"COLUMNS": "200", "TERM": "dumb"}
    )
    return result.exit_code, result.output


def test_no_arguments_print_the_help_and_exit_with_0() -> None:
    code, output = invoke()
    assert code == 0
    assert "Usage: torchferry" in output
    assert (code, output) == invoke("--help")


def test_the_help_shows_flags_without_a_type() -> None:
    _, output = invoke("--help")
    assert "--version" in output
    assert "--help" in output
    assert "bool" not in output


def test_the_version_is_printed() -> None:
    assert invoke("--version") == (0, f"torchferry {__version__}\n")


@pytest.mark.parametrize(
    ("argument", "message"),
    [("frobnicate", "No such command 'frobnicate'"), ("--frobnicate", "No such option: --frobnicate")],
)
def test_an_unknown_argument_is_an_error_that_names_it(argument: str, message: str) -> None:
    code, output = invoke(argument)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
