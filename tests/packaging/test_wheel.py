"""The wheel builds, has the right files, and runs the README's examples in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import readme

ROOT = Path(__file__).parents[2]
BUILD_INPUTS = ["pyproject.toml", "README.md", "LICENSE", "src"]
RUNTIME = {"torch", "msgspec", "xxhash", "h11", "typer", "rich"}
EXAMPLE_TIMEOUT_S = 120


def run(*command: str | Path, cwd: Path, timeout_s: float = 300) -> str:
    """Run a command outside the checkout, without PYTHON* variables, and return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{[*map(str, command)]} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, because a build adds files to the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, folder / "checkout" / name, ignore=unwanted)
        else:
            (folder / "checkout").mkdir(exist_ok=True)
            shutil.copy(source, folder / "checkout")
    out = folder / "dist"
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, folder / "checkout", cwd=folder)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with only the wheel and its requirements.

    The requirements are links to the installed packages.
    """
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-index", "--no-deps", wheel),
        cwd=folder,
    )
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    for entry in sorted(entries_of(with_requirements(RUNTIME))):
        (Path(packages.strip()) / entry.name).symlink_to(entry)
    return python


def with_requirements(names: set[str]) -> dict[str, Distribution]:
    """Return the named distributions and, recursively, their requirements."""
    found: dict[str, Distribution] = {}
    pending = [*names]
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in found:
            found[name] = distribution(name)
            wanted = map(Requirement, found[name].requires or [])
            pending += [r.name for r in wanted if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def entries_of(distributions: dict[str, Distribution]) -> set[Path]:
    """Return the top-level files and folders of distributions in site-packages."""
    return {
        Path(str(dist.locate_file(file.parts[0])))
        for dist in distributions.values()
        for file in dist.files or []
        if file.parts[0] not in {"..", "__pycache__"}
    }


def test_the_wheel_has_the_package_and_its_type_marker_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources <= set(names)
    assert "torchferry/py.typed" in names
    top_levels = {name.partition("/")[0] for name in names}
    assert top_levels == {"torchferry", f"torchferry-{wheel.name.split('-')[1]}.dist-info"}


@pytest.mark.parametrize("program", ["demo", "bench"])
def test_the_wheel_has_no_demo_and_no_benchmark(wheel: Path, program: str) -> None:
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if f"/{program}/" in name]


def test_the_wheel_has_its_licence_and_its_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert archive.read(licence).decode() == (ROOT / "LICENSE").read_text()
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        headers = archive.read(metadata).decode().splitlines()
    assert "License-Expression: BSD-3-Clause" in headers
    always = {
        re.split(r"[^\w-]", header.removeprefix("Requires-Dist: "))[0]
        for header in headers
        if header.startswith("Requires-Dist: ") and "extra ==" not in header
    }
    assert always == RUNTIME


@pytest.mark.slow
def test_the_package_is_imported_from_the_wheel_and_not_from_the_checkout(installed: Path) -> None:
    script = "import torchferry; print(torchferry.__file__)"
    imported_from = Path(run(installed, "-c", script, cwd=installed.parent).strip())
    assert imported_from.is_relative_to(installed.parents[1])


@pytest.mark.slow
def test_the_version_of_the_wheel_is_that_of_the_package(installed: Path) -> None:
    script = (
        "import importlib.metadata, torchferry;"
        "print(importlib.metadata.version('torchferry'), torchferry.__version__)"
    )
    of_the_wheel, of_the_package = run(installed, "-c", script, cwd=installed.parent).split()
    assert of_the_wheel == of_the_package


@pytest.mark.slow
def test_the_installed_command_runs(wheel: Path, installed: Path) -> None:
    version = wheel.name.split("-")[1]
    command = installed.with_name("torchferry")
    assert run(command, "--version", cwd=installed.parent) == f"torchferry {version}\n"
    assert "Usage: torchferry" in run(command, cwd=installed.parent)


@pytest.mark.slow
def test_the_first_example_of_the_readme_runs(installed: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert "version 7" in readme.run_in_two_terminals(installed, tmp_path, env)


@pytest.mark.slow
def test_the_readme_example_of_pg_transport_runs(installed: Path, tmp_path: Path) -> None:
    (block,) = [block for block in readme.blocks("python") if "PGTransport(" in block]
    example = tmp_path / "example.py"
    example.write_text(block)
    assert "caught up" in run(installed, example, cwd=tmp_path, timeout_s=EXAMPLE_TIMEOUT_S)
