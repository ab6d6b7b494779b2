"""A witness: notes all that belongs to a network before, and says afterwards what is no longer the same."""

import random
from contextlib import contextmanager

import numpy as np
import torch

HOOKS = [
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
]


def describe(network):
    """Every fact about a network that a visitor must not change, by a readable key."""
    facts = {}
    for name, module in network.named_modules(remove_duplicate=False):
        at = f"{name or 'network'}:"
        facts[f"{at} identity"] = id(module)
        facts[f"{at} training"] = module.training
        facts[f"{at} attributes"] = sorted(module.__dict__)
        facts[f"{at} values"] = {key: value for key, value in module.__dict__.items() if isinstance(value, (int, str))}
        for kind in HOOKS:
            facts[f"{at} {kind}"] = list(getattr(module, kind).items())
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            facts[f"{at} {key} identity"] = id(tensor)
            if tensor is None:
                continue
            facts[f"{at} {key} place"] = (tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape))
            facts[f"{at} {key} bits"] = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            facts[f"{at} {key} requires_grad"] = tensor.requires_grad
            facts[f"{at} {key} gradient"] = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
    return facts


def surroundings():
    """Global state that a visitor must not change."""
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "numpy's random state": str(np.random.get_state()),
        "python's random state": random.getstate(),
        "gradients enabled": torch.is_grad_enabled(),
        "default type": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def unchanged(*networks):
    """Whatever happens inside, also an exception: the networks and their surroundings are the same afterwards."""
    before = [describe(network) for network in networks], surroundings()
    try:
        yield
    finally:
        after = [describe(network) for network in networks], surroundings()
        for old, new in zip((*before[0], before[1]), (*after[0], after[1]), strict=True):
            different = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            assert not different, f"changed: {different}"
