"""The `torchferry` command: help, version, and errors for what it does not know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchferry import __version__, cli

Invoke = Callable[..., tuple[int, str]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """A function that returns the exit code and the output of `torchferry` with some arguments."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["torchferry", *arguments])
        with pytest.raises(SystemExit) as raised:
            cli.main()
        assert isinstance(raised.value.code, int)
        return raised.value.code, "".join(capsys.readouterr())

    return run


def test_no_arguments_print_the_help_and_exit_with_0(invoke: Invoke) -> None:
    code, output = invoke()
    assert code == 0
    assert "Usage: torchferry" in output
    assert (code, output) == invoke("--help")


def test_the_help_shows_flags_without_a_type(invoke: Invoke) -> None:
    _, output = invoke("--help")
    assert "--version" in output
    assert "--help" in output
    assert "bool" not in output


def test_the_version_is_printed(invoke: Invoke) -> None:
    assert invoke("--version") == (0, f"torchferry {__version__}\n")


@pytest.mark.parametrize(
    ("argument", "message"),
    [("frobnicate", "No such command 'frobnicate'"), ("--frobnicate", "No such option: --frobnicate")],
)
def test_an_unknown_argument_is_an_error_that_names_it(invoke: Invoke, argument: str, message: str) -> None:
    code, output = invoke(argument)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
