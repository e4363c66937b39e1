"""The `torchferry` command. A subcommand is a function in another module, added in `_build_app`.

The library does not import this module, so programs that use only the library never load typer or rich.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from torchferry import __version__


def main() -> None:
    """Run the command line. This is the entry point of the console script.

    Raises:
        SystemExit: always, with the exit code.
    """
    _build_app()(prog_name="torchferry")


class _Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            # typer shows `<bool>` after a flag, although a flag takes no value.
            option.metavar = ""
        return option

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Without arguments, print the help and exit with 0. typer's no_args_is_help exits with 2.
        return super().parse_args(ctx, args or ["--help"])


def _build_app() -> typer.Typer:
    app = typer.Typer(
        cls=_Group,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        # Wraps the paragraphs of a docstring to the width of the terminal.
        rich_markup_mode="markdown",
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"torchferry {__version__}")
            raise typer.Exit

    # With a callback, typer accepts an app with one subcommand or none.
    @app.callback(
        help="Moves live PyTorch state from the processes that have it to the processes that need it."
    )
    def torchferry(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, metavar="", help="Print the version."
        ),
    ) -> None:
        pass

    return app
