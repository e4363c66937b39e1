"""The layers import only what they may, the core is pure, and importing torchferry has no side effects.

Every rule is tested twice: on the package, and on a snippet that breaks it, which the checker must report.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.architecture import rules
from tests.architecture.rules import Module

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


def read_module(path: Path) -> Module:
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package)


MODULES = [read_module(path) for path in sorted((SRC / rules.PACKAGE).rglob("*.py"))]
KNOWN = frozenset(module.name for module in MODULES)


def declared_packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[^\w-]", wanted)[0] for group in groups for wanted in group}


def breaches(rule: Callable[[Module], list[str]]) -> list[str]:
    return [breach for module in MODULES for breach in rule(module)]


class TestEveryModule:
    def test_is_found(self) -> None:
        assert {"torchferry", "torchferry.core", "torchferry.errors"} <= KNOWN

    def test_imports_only_allowed_layers(self) -> None:
        assert breaches(lambda module: rules.layer_breaches(module, KNOWN)) == []

    def test_of_core_is_pure_and_of_tensors_does_no_io(self) -> None:
        assert breaches(rules.purity_breaches) == []

    def test_does_not_use_the_terminal_outside_the_command_line(self) -> None:
        assert breaches(rules.terminal_breaches) == []

    def test_imports_numpy_only_when_it_is_needed(self) -> None:
        assert breaches(rules.numpy_breaches) == []

    def test_does_not_use_pickle_outside_the_modules_that_check_it(self) -> None:
        assert breaches(rules.pickle_breaches) == []

    def test_imports_nothing_by_a_computed_name(self) -> None:
        assert breaches(rules.computed_import_breaches) == []

    def test_imports_only_packages_that_are_declared(self) -> None:
        declared = declared_packages()
        assert breaches(lambda module: rules.undeclared_breaches(module, declared)) == []

    def test_does_not_use_private_apis_of_torch_outside_one_module(self) -> None:
        assert breaches(rules.private_torch_breaches) == []

    def test_creates_tensors_with_a_device(self) -> None:
        assert breaches(rules.device_breaches) == []

    def test_has_a_descriptive_name(self) -> None:
        assert breaches(rules.shape_breaches) == []


class TestEveryExample:
    def test_imports_only_the_public_package(self) -> None:
        paths = sorted((ROOT / "examples").glob("*.py"))
        assert paths
        examples = [Module(path.stem, path.read_text()) for path in paths]
        assert [breach for example in examples for breach in rules.example_breaches(example)] == []


class TestTheCheckerReports:
    KNOWN = frozenset(
        {
            "torchferry.core.plan",
            "torchferry.engine",
            "torchferry.pg_transport",
            "torchferry.errors",
        }
    )

    @pytest.mark.parametrize(
        ("name", "source"),
        [
            ("torchferry.core.plan", "from torchferry.tensors import kinds"),
            ("torchferry.core.plan", "from torchferry import engine"),
            ("torchferry.core.plan", "from .. import links"),
            ("torchferry.core.plan", "from ..links.base import Link"),
            ("torchferry.core.plan", "def late():\n    import torchferry.engine"),
            ("torchferry.tensors.kinds", "import torchferry.links.base"),
            ("torchferry.tensors.kinds", "from torchferry import PGTransport"),
            ("torchferry.tensors.kinds", "from torchferry.engine import send"),
            ("torchferry.links.base", "from torchferry.tensors.kinds import Kind"),
            (
                "torchferry.links.base",
                "import importlib\nimportlib.import_module('torchferry.engine')",
            ),
            ("torchferry.engine", "from torchferry.pg_transport import PGTransport"),
            ("torchferry.engine", "from torchferry.testing.links import MemoryLink"),
            ("torchferry.engine.run", "import torchferry.cli"),
            ("torchferry.engine.push.send", "from torchferry.engine.pull import fetch"),
            ("torchferry.engine.pull.fetch", "from torchferry.engine.sync import bundles"),
            ("torchferry.engine.sink", "from torchferry.engine.push.send import send_state"),
            ("torchferry.testing.links", "import torchferry"),
            ("torchferry.errors", "from torchferry.core.plan import Plan"),
            ("torchferry.pg_transport", "from torchferry.testing import links"),
            ("torchferry.stray", ""),
        ],
    )
    def test_an_import_across_layers(self, name: str, source: str) -> None:
        assert rules.layer_breaches(Module(name, source), self.KNOWN)

    def test_no_allowed_import(self) -> None:
        for name, source in [
            ("torchferry.core.codec", "from . import plan\nfrom torchferry import errors"),
            ("torchferry.tensors.kinds", "from torchferry.core.plan import Plan\nimport torch"),
            ("torchferry.engine", "from torchferry.links.base import Link"),
            ("torchferry.testing.links", "from torchferry import engine, errors"),
            ("torchferry.pg_transport", "from torchferry.engine.push import send"),
            ("torchferry.engine.sync.bundles", "from torchferry.engine.pull.fetch import fetch_state"),
        ]:
            assert rules.layer_breaches(Module(name, source), self.KNOWN) == []

    def test_an_example_that_imports_a_private_module(self) -> None:
        assert rules.example_breaches(Module("example", "from torchferry.engine import push"))
        assert rules.example_breaches(Module("example", "from torchferry import PGTransport")) == []

    def test_relative_imports_of_a_package_and_of_a_module(self) -> None:
        package = Module("torchferry.core", "from .. import engine", is_package=True)
        assert rules.layer_breaches(package, self.KNOWN)
        package = Module("torchferry.core", "from . import plan", is_package=True)
        assert rules.layer_breaches(package, self.KNOWN) == []

    @pytest.mark.parametrize(
        "source",
        [
            "import torch",
            "from torch import Tensor",
            "import time",
            "from random import Random",
            "import threading",
            "import logging",
            "import os.path",
            "import socket",
            "import asyncio",
            "def late():\n    import torch",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "torch = __import__('torch')",
            "text = open('file').read()",
            "print('hello')",
        ],
    )
    def test_an_impure_core(self, source: str) -> None:
        assert rules.purity_breaches(Module("torchferry.core.plan", source))

    @pytest.mark.parametrize("name", ["socket", "threading", "subprocess", "multiprocessing", "time"])
    def test_tensors_that_do_io(self, name: str) -> None:
        assert rules.purity_breaches(Module("torchferry.tensors.kinds", f"import {name}"))

    def test_a_terminal_library_outside_the_command_line(self) -> None:
        source = "def late():\n    from rich.table import Table"
        assert rules.terminal_breaches(Module("torchferry.engine", source))
        assert rules.terminal_breaches(Module("torchferry.cli", source)) == []

    @pytest.mark.parametrize(
        ("source", "flagged"),
        [
            ("import numpy as np", True),
            ("from numpy import ndarray", True),
            ("try:\n    import numpy\nexcept OSError:\n    pass", True),
            ("class A:\n    import numpy", True),
            ("def late():\n    import numpy", False),
            ("try:\n    import numpy\nexcept ImportError:\n    numpy = None", False),
            ("import typing\nif typing.TYPE_CHECKING:\n    import numpy", False),
        ],
    )
    def test_numpy_imported_unconditionally(self, source: str, flagged: bool) -> None:
        assert bool(rules.numpy_breaches(Module("torchferry.tensors.kinds", source))) == flagged

    @pytest.mark.parametrize("source", ["import pickle", "from pickle import loads", "import marshal"])
    def test_pickle_outside_its_modules(self, source: str) -> None:
        assert rules.pickle_breaches(Module("torchferry.engine", source))

    def test_a_module_imported_by_a_computed_name(self) -> None:
        source = "from importlib import import_module\ndef load(name):\n    import_module(name)"
        assert rules.computed_import_breaches(Module("torchferry.core.codec", source))

    def test_an_undeclared_package(self) -> None:
        module = Module("torchferry.engine", "import json, torch\nimport requests.adapters")
        assert len(rules.undeclared_breaches(module, {"torch"})) == 1

    @pytest.mark.parametrize(
        ("source", "flagged"),
        [
            ("from torch._C import _dynamo", True),
            ("from torch.utils._pytree import tree_map", True),
            ("from torch.distributed.distributed_c10d import _world", True),
            ("import torch._dynamo", True),
            ("import torch\ntorch._neg_view(x)", True),
            ("mesh._layout", True),
            ("from torch.nn import Module", False),
            ("class A:\n    def f(self):\n        self._x = 1\n        return other._x", False),
            ("pair._replace(path=())", False),
        ],
    )
    def test_private_apis_of_torch(self, source: str, flagged: bool) -> None:
        assert bool(rules.private_torch_breaches(Module("torchferry.tensors.kinds", source))) == flagged
        assert rules.private_torch_breaches(Module("torchferry.torch_internals", source)) == []

    @pytest.mark.parametrize(
        ("source", "flagged"),
        [
            ("torch.empty(3)", True),
            ("torch.sparse_coo_tensor(i, v, check_invariants=True)", True),
            ("torch.empty(3, device='cpu')", False),
            ("torch.empty_like(x)", False),
        ],
    )
    def test_a_tensor_without_a_device(self, source: str, flagged: bool) -> None:
        assert bool(rules.device_breaches(Module("torchferry.tensors.kinds", source))) == flagged

    @pytest.mark.parametrize("name", sorted(rules.BANNED_NAMES))
    def test_a_vague_name(self, name: str) -> None:
        assert rules.shape_breaches(Module(f"torchferry.core.{name}", ""))


# Run in a fresh interpreter, with the given line between two observations. torch is imported first, because
# its import has side effects.
OBSERVE = """
import json, logging, os, sys, threading, warnings
for name in {torch_modules!r}:
    __import__(name)
import torch

def observe():
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    return dict(
        threads=sorted(t.name for t in threading.enumerate()),
        tasks=len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0,
        environment=dict(os.environ),
        handlers=sum(len(getattr(logger, "handlers", [])) for logger in loggers),
        levels=[logging.getLogger().level, logging.getLogger("torchferry").level],
        warning_filters=len(warnings.filters),
        torch=[torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
        rng=hash(bytes(torch.get_rng_state().tolist())),
    )

before = observe()
{line}
print(json.dumps(dict(before=before, after=observe(), modules=sorted(sys.modules))))
"""


def observe(line: str) -> dict[str, Any]:
    torch_modules = sorted(
        {i.name for m in MODULES for i in rules.imports_of(m) if i.top == "torch" and not i.lazy}
    )
    script = OBSERVE.format(line=line, torch_modules=torch_modules)
    return json.loads(run_python(script))  # type: ignore[no-any-return]


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=SRC, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def observed() -> dict[str, Any]:
    return observe("import torchferry")


class TestImportingTorchferry:
    @pytest.mark.parametrize(
        "aspect",
        [
            "threads",
            "tasks",
            "environment",
            "handlers",
            "levels",
            "warning_filters",
            "torch",
            "rng",
        ],
    )
    def test_does_not_change(self, aspect: str, observed: dict[str, Any]) -> None:
        assert observed["before"][aspect] == observed["after"][aspect]

    def test_imports_neither_typer_nor_rich(self, observed: dict[str, Any]) -> None:
        assert "torchferry" in observed["modules"]
        assert not rules.TERMINAL.intersection(observed["modules"])

    def test_works_where_numpy_is_not_installed(self) -> None:
        run_python("import sys; sys.modules['numpy'] = None; import torchferry")

    @pytest.mark.slow
    def test_is_observed_in_a_way_that_detects_changes(self) -> None:
        changes = {
            "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "environment": "os.environ['TORCHFERRY'] = '1'",
            "handlers": "logging.basicConfig()",
            "levels": "logging.getLogger('torchferry').setLevel('INFO')",
            "warning_filters": "warnings.simplefilter('ignore')",
            "torch": "torch.set_num_threads(7)",
            "rng": "torch.rand(1)",
        }
        observed = observe("; ".join(changes.values()))
        assert [aspect for aspect in changes if observed["before"][aspect] == observed["after"][aspect]] == []
