"""The README's code and commands run as they are, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchferry
from tests.faults.controller import wait_until
from tests.support import readme
from tests.support.equality import assert_same

ROOT = readme.README.parent


def run(block: str, names: dict[str, Any], meanwhile: Callable[[], object]) -> None:
    """Run a block of Python with some names, while another thread does something."""
    thread = threading.Thread(target=meanwhile)
    thread.start()
    exec(block, names)
    thread.join()


def block_with(text: str) -> str:
    (found,) = [block for block in readme.blocks("python") if text in block]
    return found


def test_the_first_example_has_at_most_ten_lines_and_runs_in_two_terminals(tmp_path: Path) -> None:
    assert sum(block.count("\n") for block in readme.blocks("python")[:2]) <= 10
    printed = readme.run_in_two_terminals(sys.executable, tmp_path, os.environ)
    assert "version 7: 4,004,000 of 4,004,000 bytes moved" in printed


def test_what_it_says_about_serve_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"torchferry": torchferry, "state": {"weight": torch.ones(3)}}

    def fetch_version_8() -> None:
        wait_until(lambda: "source" in names, "nothing is served")
        torchferry.fetch(names["source"].address, newer_than=7, timeout=10)

    run(block_with("source.publish(state, version=8)"), names, fetch_version_8)
    assert "state version 8, confirmed" in capsys.readouterr().out


def test_what_it_says_about_objects_runs() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    names: dict[str, Any] = {"torchferry": torchferry, "model": model, "optimizer": optimizer, "step": 7}
    names["scheduler"] = scheduler
    exec(block_with("torchferry.RNG()"), names)
    names["source"].close()
    assert names["got"].state["model"] is model
    assert names["step"] == 7


def test_what_it_says_about_fetch_runs() -> None:
    state = {"weight": torch.ones(3)}
    with torchferry.serve(state, version=8) as source:
        params = {"weight": torch.zeros(3)}
        names: dict[str, Any] = {"torchferry": torchferry, "address": source.address, "params": params}

        def publish_a_newer_version() -> None:
            source.wait(8, receivers=2, timeout=10)
            source.publish({"weight": torch.full((3,), 9.0)}, version=9)

        run(block_with("newer_than=got.version"), names, publish_a_newer_version)
    assert names["got"].version == 9
    assert_same(params, {"weight": torch.full((3,), 9.0)})


def test_what_it_says_about_several_sources_runs(capsys: pytest.CaptureFixture[str]) -> None:
    state, params = {"weight": torch.ones(3)}, {"weight": torch.zeros(3)}
    with torchferry.serve(state, version=8) as one, torchferry.serve(state, version=8) as two:
        names = {"torchferry": torchferry, "address": one.address, "another": two.address, "params": params}
        exec(block_with("[address, another]"), names)
    assert capsys.readouterr().out == "12 0\n"
    assert_same(params, state)


@pytest.mark.slow
def test_its_commands_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    (commands,) = [block.splitlines() for block in readme.blocks("sh") if "torchferry" in block]
    serve, fetch = (line.partition("#")[0].replace("torchferry ", "-m torchferry ", 1) for line in commands)
    with subprocess.Popen(
        [sys.executable, *serve.split()], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("http://127.0.0.1:")
            subprocess.run([sys.executable, *fetch.split()], cwd=tmp_path, check=True, timeout=60)
        finally:
            server.terminate()
    assert server.returncode == 0
    assert_same(torch.load(tmp_path / "copy.pt"), {"weight": torch.ones(3)})


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("*.md")))
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", Path(ROOT, page).read_text())
    assert [link for link in links if "://" not in link and not Path(ROOT, link).exists()] == []
