"""The `torchferry` command. Each subcommand is a function elsewhere, added in `_build_app`.

Nothing else imports this module, so a program that only uses the library never loads typer or rich.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from torchferry import __version__


def main() -> None:
    """Run the command line; what the console script calls.

    Raises:
        SystemExit: always, with the exit code.
    """
    _build_app()(prog_name="torchferry")


class _Command(TyperCommand):
    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))


class _Group(TyperGroup):
    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Asked for nothing, show what there is. That is not a mistake, and exits with 0.
        return super().parse_args(ctx, args or ["--help"])


def _without_type(option: Any) -> Any:
    """Show a flag without the `<bool>` that typer puts behind it: it takes no value."""
    if option is not None:
        option.metavar = ""
    return option


def _build_app() -> typer.Typer:
    # Inside, because they take a while to import, which `--version` need not take.
    from torchferry.demo.command import demo

    app = typer.Typer(
        cls=_Group,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        # So that the paragraphs of a docstring are wrapped to the terminal's width.
        rich_markup_mode="markdown",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"torchferry {__version__}")
            raise typer.Exit

    # With a callback, a single subcommand is still a subcommand and not the whole command.
    @app.callback(help="Carries live PyTorch state from the processes that have it to those that need it.")
    def torchferry(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, metavar="", help="Print the version."
        ),
    ) -> None:
        pass

    app.command(cls=_Command)(demo)
    return app
