"""A checksum that identifies a trained network."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from mola.network.calling import check_network, unwrapped


def state_checksum(network: nn.Module) -> str:
    """Return the SHA-256 over names, types, shapes and bytes of a network's state dict, whatever its device."""
    check_network(network)
    digest = hashlib.sha256()
    for name, value in sorted(unwrapped(network).state_dict().items()):
        if not isinstance(value, torch.Tensor):  # the extra state of a module, which may be any object
            continue
        digest.update(f"{name.replace('_orig_mod.', '')} {value.dtype} {tuple(value.shape)}\n".encode())
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
