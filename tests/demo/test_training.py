"""Training is exact, an attempt leaves no trace, and each part of the state is needed to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from torchferry.demo.training import Training, TrainingState

SIZE = 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the demo's workers. It is also faster, with several processes on few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step(workers: list[Training]) -> None:
    """One step of all workers, with the sum that the all-reduce would give them."""
    attempts = [worker.attempt(rank, SIZE) for rank, worker in enumerate(workers)]
    total = attempts[0].gradients + attempts[1].gradients
    for worker, attempt in zip(workers, attempts, strict=True):
        attempt.gradients.copy_(total)
        worker.commit(attempt, SIZE)


def trained(steps: int, seed: int = 3) -> list[Training]:
    workers = [Training.fresh(seed) for _ in range(SIZE)]
    for _ in range(steps):
        step(workers)
    return workers


def carry(source: TrainingState, target: TrainingState) -> TrainingState:
    """What a transport does: the source's bytes land in the target's tensors."""
    for name, tensor in target["model"].items():
        tensor.copy_(source["model"][name])
    for index, moments in target["optimizer"]["state"].items():
        for key, tensor in moments.items():
            tensor.copy_(source["optimizer"]["state"][index][key])
    target["rng"].copy_(source["rng"])
    return {
        "model": target["model"],
        "optimizer": {
            "state": target["optimizer"]["state"],
            "param_groups": source["optimizer"]["param_groups"],
        },
        "rng": target["rng"],
        "step": source["step"],
    }


def forget_model(state: TrainingState) -> None:
    state["model"]["middle.bias"].add_(1e-3)


def forget_optimizer(state: TrainingState) -> None:
    for moments in state["optimizer"]["state"].values():
        for moment in moments.values():
            moment.zero_()


def forget_rng(state: TrainingState) -> None:
    state["rng"] = torch.Generator().manual_seed(1).get_state()


def heal_and_finish(spoil: Callable[[TrainingState], None]) -> dict[str, bytes]:
    """Replace the second of two workers after two steps, train for two more."""
    survivor, _ = trained(2)
    replacement = Training.blank()
    state = carry(survivor.state(), replacement.state())
    spoil(state)
    replacement.adopt(state)
    workers = [survivor, replacement]
    step(workers)
    step(workers)
    return replacement.portrait()


def test_all_workers_stay_equal() -> None:
    first, second = trained(3)
    assert first.portrait() == second.portrait()
    assert first.step == 3


def test_the_loss_goes_down() -> None:
    early, late = trained(1)[0].loss, trained(20)[0].loss
    assert early is not None
    assert late is not None
    assert late < 0.6 * early


def test_an_attempt_changes_nothing_and_can_be_repeated() -> None:
    worker = trained(1)[0]
    before = worker.portrait()
    first, second = worker.attempt(0, SIZE), worker.attempt(0, SIZE)
    assert worker.portrait() == before
    assert torch.equal(first.gradients, second.gradients)


def test_the_state_is_made_of_the_live_tensors_also_at_step_0() -> None:
    worker = Training.fresh(0)
    state = worker.state()
    assert state["model"]["enter.weight"].data_ptr() == worker.parameters[0].data_ptr()
    moments = worker.optimizer.state[worker.parameters[0]]
    assert state["optimizer"]["state"][0]["exp_avg"] is moments["exp_avg"]


def test_adopting_keeps_the_moments_where_the_bytes_have_landed() -> None:
    worker = Training.blank()
    landed = worker.state()
    worker.adopt(landed)
    moments = worker.optimizer.state[worker.parameters[0]]
    assert moments["exp_avg"] is landed["optimizer"]["state"][0]["exp_avg"]


def test_moments_made_beforehand_train_like_those_that_adamw_makes() -> None:
    ours, lazily = Training.fresh(5), Training.fresh(5)
    lazily.optimizer.state.clear()
    for worker in (ours, lazily):
        worker.commit(worker.attempt(0, 1), 1)
    assert ours.portrait() == lazily.portrait()


def test_a_replacement_that_healed_ends_like_one_that_was_always_there() -> None:
    assert heal_and_finish(lambda state: None) == trained(4)[1].portrait()


@pytest.mark.parametrize("forget", [forget_model, forget_optimizer, forget_rng])
def test_a_replacement_that_lacks_a_part_of_the_state_ends_with_other_weights(
    forget: Callable[[TrainingState], None],
) -> None:
    whole, lacking = trained(4)[1].portrait(), heal_and_finish(forget)
    assert whole["model.enter.weight"] != lacking["model.enter.weight"]
