"""Digests show every bit, and a poisoned state shows that nothing was received."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.states import (
    Gpt,
    StateSpec,
    Uniform,
    differing_paths,
    digest_leaves,
    leaves,
    poison,
    storages,
)

SPECS: list[StateSpec] = [Uniform(3, 4096), Uniform(2, 20), Uniform(4, 400, views=True), Gpt(2, 16, 64, 8)]


class TestDigests:
    def test_show_one_flipped_bit(self) -> None:
        state = Uniform(3, 4096).build()
        before = digest_leaves(state)
        one = state["tensor000001"]
        assert isinstance(one, torch.Tensor)
        one.view(torch.uint8)[77] ^= 1
        assert differing_paths(before, digest_leaves(state)) == ["tensor000001"]

    @pytest.mark.parametrize(
        "change",
        [lambda t: t.view(torch.int32), lambda t: t.view(2, -1), lambda t: t[:-1], lambda t: t + 0.0],
    )
    def test_show_dtype_shape_and_size(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        one = torch.full((8,), -0.0)
        assert digest_leaves({"a": one}) != digest_leaves({"a": change(one)})

    def test_show_the_bits_of_nan(self) -> None:
        nan = torch.tensor([float("nan")])
        assert digest_leaves(nan) == digest_leaves(nan.clone())

    def test_do_not_depend_on_strides(self) -> None:
        one = torch.arange(12.0).view(3, 4)
        assert digest_leaves(one) == digest_leaves(one.t().contiguous().t())


class TestPoison:
    @pytest.mark.parametrize("spec", SPECS, ids=repr)
    def test_changes_every_tensor(self, spec: StateSpec) -> None:
        state = spec.build()
        before = digest_leaves(state)
        poison(state)
        tensors = {path for path, digest in before.items() if digest.startswith("torch.")}
        assert set(differing_paths(before, digest_leaves(state))) == tensors


class TestASpec:
    @pytest.mark.parametrize("spec", SPECS, ids=repr)
    def test_builds_the_same_bits_again(self, spec: StateSpec) -> None:
        assert digest_leaves(spec.build()) == digest_leaves(spec.build())

    @pytest.mark.parametrize("spec", SPECS, ids=repr)
    def test_counts_its_tensors_and_bytes(self, spec: StateSpec) -> None:
        state = spec.build()
        tensors = [leaf for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
        assert len(tensors) == spec.tensors
        assert sum(storage.nbytes for storage in storages(state)) == spec.state_bytes

    def test_of_gpt2_is_as_large_as_gpt2_with_adamw(self) -> None:
        small = Gpt(layers=12, width=768, vocabulary=50257, context=1024)
        assert small.state_bytes // 12 == pytest.approx(124_439_808, rel=1e-5)
