"""The `torchferry` command. Each subcommand is a function elsewhere, added in `_build_app`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchferry import __version__

if TYPE_CHECKING:
    import typer

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line; what the console script calls.

    Raises:
        SystemExit: always, with the exit code.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        print(
            f"torchferry's commands need {' and '.join(_NEEDED)}: install its extra cli, which in a "
            "checkout is pip install '.[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    _build_app()(prog_name="torchferry")


def _build_app() -> typer.Typer:
    # Inside, because the library must be importable without typer.
    import typer

    from torchferry.bench.cluster_command import bench_cluster
    from torchferry.bench.command import bench
    from torchferry.demo.command import demo

    app = typer.Typer(
        no_args_is_help=True,
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
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    app.command()(demo)
    app.command()(bench)
    app.command()(bench_cluster)
    return app
