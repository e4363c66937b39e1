"""The `torchferry` command. A subcommand is a function in another module, added in `main`.

The library does not import this module, so programs that use only the library never load typer.
"""

import sys

import typer

from torchferry import __version__


def main() -> None:
    """Run the command line, the entry point of the console script; always raises SystemExit."""
    # rich_markup_mode=None, because the help that typer formats with rich shows `<bool>` after a flag.
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)
    app.callback()(_torchferry)
    # Without arguments, print the help and exit with 0. typer's no_args_is_help exits with 2.
    app(sys.argv[1:] or ["--help"], prog_name="torchferry")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchferry {__version__}")
        raise typer.Exit


def _torchferry(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Moves live PyTorch state from the processes that have it to the processes that need it."""
