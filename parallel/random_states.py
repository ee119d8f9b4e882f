"""Random states of this rank: Python, NumPy, torch (CPU and device), Megatron-Core's tracker."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import random as tracked


def get() -> dict[str, Any]:
    """All states of this process, as plain data and tensors: `torch.load(weights_only=True)`."""
    states = tracked.get_cuda_rng_tracker().get_states()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "device": tracked._get_cuda_rng_state(),
        "tracker": {n: tracked.convert_cuda_rng_state(s) for n, s in states.items()},
    }


def set(states: dict[str, Any]) -> None:
    """Continue from what `get` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    tracked._set_cuda_rng_state(states["device"])
    torch.set_rng_state(states["torch"])
    tracker = tracked.get_cuda_rng_tracker()
    current = tracker.get_states()
    for name, state in states["tracker"].items():
        if isinstance(current.get(name), torch.Generator):  # a captured graph holds this object
            current[name].set_state(state)
        else:
            current[name] = state
    tracker.set_states(current)
