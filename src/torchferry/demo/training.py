"""What the workers train: a small network on a made-up task, fed by one stream of random numbers.

All workers hold the same state: weights, AdamW's moments, the step, and the state of torch's random
number generator. In a step each of them draws the *whole* batch and the *whole* dropout noise from
that stream and works on its own share of both. So a worker whose random state is not its peers'
trains on other data than it should, and the final weights show it.

A step has two halves. `attempt` reads the state and changes nothing in it; `commit` takes the step.
Between them lies the all-reduce. If that fails, the attempt is dropped, and nothing has happened.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

_FEATURES = 128
_HIDDEN = 512
_SHARE = 32  # samples for each worker in each step
_DROPOUT = 0.1


class TrainingState(TypedDict):
    """All that a worker must have to go on where another one stands."""

    model: dict[str, Tensor]
    optimizer: StateDict
    rng: Tensor
    step: int


@dataclass(frozen=True)
class Attempt:
    """A step that is computed but not yet taken."""

    gradients: Tensor
    """All gradients of this worker's share, flat, and its loss: to be summed over all workers."""
    rng: Tensor
    """The random state after the step."""


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(_FEATURES, _HIDDEN)
        self.middle = nn.Linear(_HIDDEN, _HIDDEN)
        self.leave = nn.Linear(_HIDDEN, _FEATURES)

    def forward(self, inputs: Tensor, kept: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.enter(inputs)) * kept[:, 0]
        hidden = nn.functional.gelu(self.middle(hidden)) * kept[:, 1]
        return cast(Tensor, self.leave(hidden))


class Training:
    """A training run at some step. Build one with `fresh` or `blank`."""

    def __init__(self) -> None:
        self.step = 0
        self.loss: float | None = None
        self.model = _Network()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=2e-3)
        # AdamW makes its moments in its first step. They are made here, so that at step 0 too there
        # are tensors for a peer's state to land in.
        for parameter in self.parameters:
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.rng = torch.get_rng_state()

    @classmethod
    def fresh(cls, seed: int) -> Training:
        """A run at its beginning; the same on every worker that is given the same seed."""
        torch.manual_seed(seed)
        return cls()

    @classmethod
    def blank(cls) -> Training:
        """The right shapes with arbitrary content: what a replacement has before it heals."""
        torch.seed()
        return cls()

    def attempt(self, rank: int, size: int) -> Attempt:
        """Compute this worker's share of the next step's gradients. The state stays as it is."""
        torch.set_rng_state(self.rng)
        samples = torch.randn(size * _SHARE, _FEATURES)
        kept = (torch.rand(size * _SHARE, 2, _HIDDEN) >= _DROPOUT).float() / (1 - _DROPOUT)
        rng = torch.get_rng_state()

        share = slice(rank * _SHARE, (rank + 1) * _SHARE)
        inputs = samples[share]
        targets = torch.tanh(inputs - inputs.roll(1, dims=1))
        loss = nn.functional.mse_loss(self.model(inputs, kept[share]), targets)
        gradients = torch.autograd.grad(loss, self.parameters)
        flat = torch.cat([part.reshape(-1) for part in (*gradients, loss.detach())])
        return Attempt(flat, rng)

    def commit(self, attempt: Attempt, size: int) -> None:
        """Take the step, whose gradients have been summed over `size` workers."""
        mean = attempt.gradients / size
        sizes = [parameter.numel() for parameter in self.parameters]
        *gradients, loss = mean.split([*sizes, 1])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        self.rng = attempt.rng
        self.step += 1
        self.loss = loss.item()

    def state(self) -> TrainingState:
        """The state, by reference: its tensors are the live ones."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng,
            "step": self.step,
        }

    def adopt(self, state: TrainingState) -> None:
        """Go on from `state`, whose bytes have landed in the tensors that `state()` gave.

        The weights are thus in place already. What is left is what no tensor holds: the step, and
        AdamW's settings.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng = state["rng"]
        self.step = state["step"]

    def portrait(self) -> dict[str, bytes]:
        """The bytes of every tensor of the state, by name, to be compared with another's."""
        return {name: _bytes_of(tensor) for name, tensor in self._named_tensors()}

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield f"model.{name}", parameter
            for key, moment in self.optimizer.state[parameter].items():
                yield f"optimizer.{name}.{key}", moment
        yield "rng", self.rng
        yield "step", torch.tensor(self.step)


def _bytes_of(tensor: Tensor) -> bytes:
    # Not by way of numpy, which torchferry does not depend on.
    whole = tensor.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)
