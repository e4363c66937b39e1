"""`python -m benchmarks` and `python -m benchmarks cluster`."""

import sys

import typer

from benchmarks.cluster_command import bench_cluster
from benchmarks.command import bench


def main() -> None:
    """Run one of the two commands.

    Raises:
        SystemExit: always, with the exit code.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    arguments = sys.argv[1:]
    if arguments[:1] == ["cluster"]:
        app.command()(bench_cluster)
        app(arguments[1:], prog_name="python -m benchmarks cluster")
    else:
        app.command()(bench)
        app(arguments, prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
