"""A portrait shows every bit, and a spoilt state shows that nothing has arrived."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.portrait import differences, poison, portray
from benchmarks.recipes import Gpt, Recipe, Uniform, Views

RECIPES: list[Recipe] = [Uniform(3, 4096), Uniform(2, 20), Views(4, 400), Gpt(2, 16, 64, 8)]


class TestAPortrait:
    def test_shows_one_flipped_bit(self) -> None:
        state = Uniform(3, 4096).build()
        before = portray(state)
        one = state["tensor000001"]
        assert isinstance(one, torch.Tensor)
        one.view(torch.uint8)[77] ^= 1
        assert differences(before, portray(state)) == ["tensor000001"]

    @pytest.mark.parametrize(
        "change",
        [lambda t: t.view(torch.int32), lambda t: t.view(2, -1), lambda t: t[:-1], lambda t: t + 0.0],
    )
    def test_shows_dtype_shape_and_size(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        one = torch.full((8,), -0.0)
        assert portray({"a": one}) != portray({"a": change(one)})

    def test_shows_nan_as_the_bits_it_is(self) -> None:
        nan = torch.tensor([float("nan")])
        assert portray(nan) == portray(nan.clone())

    def test_does_not_depend_on_strides(self) -> None:
        one = torch.arange(12.0).view(3, 4)
        assert portray(one) == portray(one.t().contiguous().t())


class TestPoison:
    @pytest.mark.parametrize("recipe", RECIPES, ids=repr)
    def test_leaves_no_tensor_as_it_was(self, recipe: Recipe) -> None:
        state = recipe.build()
        before = portray(state)
        poison(state)
        tensors = {path for path, digest in before.items() if digest.startswith("torch.")}
        assert set(differences(before, portray(state))) == tensors


class TestARecipe:
    @pytest.mark.parametrize("recipe", RECIPES, ids=repr)
    def test_makes_the_same_bits_again(self, recipe: Recipe) -> None:
        assert portray(recipe.build()) == portray(recipe.build())

    @pytest.mark.parametrize("recipe", RECIPES, ids=repr)
    def test_knows_its_tensors_and_bytes(self, recipe: Recipe) -> None:
        from benchmarks.portrait import leaves, memories

        state = recipe.build()
        tensors = [leaf for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
        assert len(tensors) == recipe.tensors
        assert sum(memory.nbytes for memory in memories(state)) == recipe.needed_bytes

    def test_of_gpt2_is_as_large_as_gpt2_with_adamw(self) -> None:
        small = Gpt(layers=12, width=768, vocabulary=50257, context=1024)
        assert small.needed_bytes // 12 == pytest.approx(124_439_808, rel=1e-5)
