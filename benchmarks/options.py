"""What the benchmark's commands have in common on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SizeOption = Annotated[
    str, typer.Option(help="smoke, small or full: how large the states are. The marks are for full.")
]
RepeatsOption = Annotated[
    int | None, typer.Option(min=1, max=1000, help="How often each is measured, after one warm-up.")
]
JsonOption = Annotated[Path | None, typer.Option(help="Write all figures to this file.")]
ReportOption = Annotated[Path | None, typer.Option(help="Write one page with tables and plots.")]
