"""The states that are sent: each is described by a few numbers, and built in any process to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, object]

_SEED = 20240501
_FLOAT_BYTES = 4


class Recipe(Protocol):
    """How to make a state. `needed_bytes` is what it takes to say it: no byte counted twice."""

    @property
    def tensors(self) -> int: ...

    @property
    def needed_bytes(self) -> int: ...

    def build(self) -> State:
        """Make the state, all of its memory written to, with the same bits in every process."""
        ...


@dataclass(frozen=True)
class Uniform:
    """`tensors` tensors of one size, each in its own memory.

    >>> Uniform(3, 64).needed_bytes
    192
    """

    tensors: int
    tensor_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.tensors * self.tensor_bytes

    def build(self) -> State:
        chance = _chance()
        return {f"tensor{i:06}": _random(self.tensor_bytes, chance) for i in range(self.tensors)}


@dataclass(frozen=True)
class Views:
    """One storage, cut into `tensors` views that together are all of it."""

    tensors: int
    view_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.tensors * self.view_bytes

    def build(self) -> State:
        views = _random(self.needed_bytes, _chance()).chunk(self.tensors)
        return {f"view{i:06}": view for i, view in enumerate(views)}


@dataclass(frozen=True)
class Gpt:
    """A model with the shapes of GPT-2 and its AdamW state, as their state dicts have them.

    The output layer is the input embedding: one tensor with two names, as in GPT-2.
    """

    layers: int
    width: int
    vocabulary: int
    context: int

    @property
    def tensors(self) -> int:
        # Weight, step and two moments for each parameter, and the second name of the embedding.
        return 4 * len(list(self._shapes())) + 1

    @property
    def needed_bytes(self) -> int:
        parameters = [torch.Size(shape).numel() for _, shape in self._shapes()]
        return _FLOAT_BYTES * (3 * sum(parameters) + len(parameters))

    def build(self) -> State:
        chance = _chance()
        shapes = dict(self._shapes())

        def filled(shape: tuple[int, ...]) -> Tensor:
            return _random(torch.Size(shape).numel() * _FLOAT_BYTES, chance).view(shape)

        model = {name: filled(shape) for name, shape in shapes.items()}
        model["lm_head.weight"] = model["transformer.wte.weight"].detach()
        moments = {
            number: {"step": torch.tensor(1000.0), "exp_avg": filled(shape), "exp_avg_sq": filled(shape)}
            for number, shape in enumerate(shapes.values())
        }
        group = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        groups = [{**group, "params": list(range(len(shapes)))}]
        return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "transformer.wte.weight", (self.vocabulary, self.width)
        yield "transformer.wpe.weight", (self.context, self.width)
        for layer in range(self.layers):
            for name, shape in self._block():
                yield f"transformer.h.{layer}.{name}", shape
        yield "transformer.ln_f.weight", (self.width,)
        yield "transformer.ln_f.bias", (self.width,)

    def _block(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        width = self.width
        for norm in ("ln_1", "ln_2"):
            yield f"{norm}.weight", (width,)
            yield f"{norm}.bias", (width,)
        for layer, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            yield f"{layer}.weight", (rows, columns)
            yield f"{layer}.bias", (columns,)


def _chance() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _random(size_bytes: int, chance: torch.Generator) -> Tensor:
    # Random bits, not random numbers: what moves states must not care what the bits mean.
    if size_bytes % 8:
        return torch.empty(size_bytes // 4, dtype=torch.int32).random_(generator=chance).view(torch.float32)
    return torch.empty(size_bytes // 8, dtype=torch.int64).random_(generator=chance).view(torch.float32)
