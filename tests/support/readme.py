"""The code blocks of the README, and its first example in two processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    """Return the code blocks of the README in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def run_in_two_terminals(python: str | Path, folder: Path, env: Mapping[str, str]) -> str:
    """Save and run the first two blocks of Python as a reader does, and return what the second one prints.

    The address goes from the output of the first to the input of the second. Then the first gets an Enter.
    """
    scripts = [folder / "serve.py", folder / "fetch.py"]
    for script, block in zip(scripts, blocks("python"), strict=False):
        script.write_text(block)
    with subprocess.Popen(
        [python, scripts[0]],
        cwd=folder,
        env={**env, "PYTHONUNBUFFERED": "1"},  # as in a terminal
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline()
            done = subprocess.run(
                [python, scripts[1]],
                cwd=folder,
                env=env,
                input=address,
                stdout=subprocess.PIPE,
                text=True,
                timeout=60,
            )
            server.communicate("\n", timeout=10)
        finally:
            server.kill()
    assert (server.returncode, done.returncode) == (0, 0)
    return done.stdout
