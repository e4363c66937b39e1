"""Thousands of mutated frames, through the decoder and all checks before the payload.

`make fuzz` runs 100,000. A failure prints its seed: FUZZ_SEED=… FUZZ_MUTATIONS=1 replays it alone.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.hostile.attacks import values
from tests.hostile.attacks.base import framed
from tests.hostile.mutations import Mutator, corpus
from tests.hostile.test_attacks import decode_any, plan, process_metadata
from tests.support.sizes import count
from torchferry.core.compare import compare, tensor_pairs
from torchferry.core.destinations import place_in_local_state
from torchferry.core.extents import Extent
from torchferry.errors import FerryError, StateMismatch
from torchferry.tensors import registry
from torchferry.tensors.assemble import assemble_fresh, choose_result_tree, misfits, prepare
from torchferry.tensors.describe import describe_target
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.kinds import RebuildContext, properties_of
from torchferry.tensors.memory import run_of

MUTATIONS = count("FUZZ_MUTATIONS", full=5000, quick=1000)
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))
MOST_SECONDS = 5.0
MOST_BYTES = 300 << 20
"""The growth of the process over all mutations."""


@pytest.fixture(autouse=True)
def _types_of_the_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {registry.name_of(cls): cls for cls in values.REGISTERED})


def outcome_of(frame: bytes, target: object) -> tuple[str, str]:
    """Process a frame as a receiver does before the payload, and return the last stage and the error.

    Raises:
        Exception: any error other than a FerryError.
    """
    stage = "decode"
    try:
        envelope = decode_any(frame)
        stage = "plan"
        placed = plan(envelope)
        stage = "prepare"
        manifest = envelope.manifest
        prepared = prepare(manifest, RebuildContext())
        stage = "assemble"
        if sum(manifest.storages) < 1 << 24:
            fresh = FreshMemory(manifest, time.perf_counter)
            for number, nbytes in enumerate(manifest.storages):
                run_of(fresh.memory(number), Extent(0, 0, nbytes)).zero_()
            assemble_fresh(prepared, fresh)
        stage = "compare"
        local = describe_target(target)
        misfits(manifest, range(len(manifest.leaves)), RebuildContext())
        comparison = compare(manifest, local.manifest, properties_of, strict=False, extra="fresh")
        # Most frames have no path in common with the target. That is not an error here.
        if comparison.mismatches and comparison.pairs:
            raise StateMismatch(comparison.mismatches)
        if not comparison.identical:
            paired = tensor_pairs(manifest, local.manifest, comparison.pairs)
            place_in_local_state(placed.extents, manifest, local.manifest, paired)
            choose_result_tree(prepared, local.manifest, strict=False, extra="fresh")
    except FerryError as error:
        return stage, f"{type(error).__name__}: {_reason(error)}"
    return "accepted", "accepted"


def _reason(error: FerryError) -> str:
    """Return the message of an error without its values."""
    reason = error.what.removeprefix(f"{error.path}: ")
    reason = re.split(r": | - |\[|\(", reason)[0]
    reason = re.sub(r"the type .*? is not", "the type … is not", reason, flags=re.DOTALL)
    reason = re.sub(r"here and .*", "here and …", reason, flags=re.DOTALL)
    return re.sub(r"(?<!\w)'[^']*'?…?|\"[^\"]*\"?…?|-?\d+", "…", reason)[:70]


def test_every_mutated_frame_is_accepted_or_raises_a_ferry_error() -> None:
    bodies = corpus()
    target = {"w": torch.zeros(8, 8), "t": torch.zeros(8, 8), "row": torch.zeros(8), "n": 0}
    outcomes: Counter[tuple[str, str]] = Counter()
    before = _resident_bytes()
    for seed in range(FIRST_SEED, FIRST_SEED + MUTATIONS):
        frame = Mutator(bodies, seed).next()
        started = time.process_time()
        try:
            outcomes[outcome_of(frame, target)] += 1
        except BaseException as error:
            error.add_note(
                f"seed {seed}: replay with FUZZ_SEED={seed} FUZZ_MUTATIONS=1; frame {frame[:2000].hex()}"
            )
            raise
        assert time.process_time() - started < MOST_SECONDS, f"seed {seed} took too long"
    assert _resident_bytes() - before < MOST_BYTES
    print(f"\n{MUTATIONS} mutations from seed {FIRST_SEED}:")
    stages: Counter[str] = Counter()
    for (stage, outcome), times in outcomes.most_common():
        stages[stage] += times
        print(f"  {times:7}  {stage}: {outcome}")
    print(f"  ended in {dict(stages.most_common())}")
    if MUTATIONS >= 5000:
        # Most frames pass the decoder, many pass all checks, and there are many different errors.
        assert stages["decode"] < MUTATIONS // 2
        assert stages["accepted"] > MUTATIONS // 20
        assert all(stages[stage] > MUTATIONS // 200 for stage in ("prepare", "assemble", "compare"))
        assert len(outcomes) > 50


def test_frames_without_mutations_are_accepted() -> None:
    for body in corpus():
        process_metadata(framed(body))


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
