"""RNG: the random number generators of a process, as an object with a state dict."""

import importlib
import random
import sys
from contextlib import suppress
from typing import Any

import torch


class RNG:
    """The global random number generators: Python's, numpy's, torch's on the CPU, and those of accelerators.

    Put it into a state like any other object: `{"model": model, "rng": torchferry.RNG()}`. The receiver then
    draws the random numbers that the source draws after it published. Instances hold nothing, so any one can
    be used.

    numpy's generator is sent if the source has imported numpy, and ignored by receivers without numpy. The
    state of the source's current accelerator goes to the receiver's current one, and the states of the others
    in the order of their indices, as many as both sides have. Accelerators of another type are left alone.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators. Their arrays of words are tensors."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = found = numpy.random.get_state(legacy=False)
            # As tensors, because receivers may have no numpy.
            arrays = {key: each for key, each in found["state"].items() if isinstance(each, numpy.ndarray)}
            found["state"] |= {key: torch.from_numpy(each.copy()) for key, each in arrays.items()}
        if (module := _accelerator()) is not None:
            states = [module.get_rng_state(index) for index in _devices(module)]
            state["accelerator"] = {"type": module.__name__, "states": states}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of all generators that both sides have."""
        python, numpy_state = state["python"], state.get("numpy")
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        # A tensor that was received in place may be a view of larger memory, which torch rejects.
        torch.set_rng_state(state["torch"].clone())
        if numpy_state is not None:
            with suppress(ImportError):
                numpy = importlib.import_module("numpy")
                words = numpy_state["state"]
                arrays = {key: each.numpy() for key, each in words.items() if isinstance(each, torch.Tensor)}
                numpy.random.set_state({**numpy_state, "state": words | arrays})
        module, sent = _accelerator(), state.get("accelerator")
        if module is not None and sent is not None and sent["type"] == module.__name__:
            for index, one in zip(_devices(module), sent["states"], strict=False):
                module.set_rng_state(one.clone(), index)


def _accelerator() -> Any:
    """Return torch's module for the accelerators here; None if there are none, or their state is hidden."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if hasattr(module, "get_rng_state") and hasattr(module, "current_device") else None


def _devices(module: Any) -> list[int]:
    """List the indices of all devices, the current one first."""
    current = module.current_device()
    return [current, *(index for index in range(module.device_count()) if index != current)]
