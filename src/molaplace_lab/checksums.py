"""Checksums that identify data: JSON values, data sets in memory, and the weights of networks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor, nn

from molaplace.network import checksum_of, state_of


def checksum(*parts: Any) -> str:
    """Return a checksum of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def data_checksum(inputs: Tensor, labels: Tensor) -> str:
    """Return a checksum of inputs and labels in memory."""
    digest = hashlib.sha256(str(tuple(inputs.shape)).encode())
    digest.update(inputs.contiguous().numpy().tobytes())
    digest.update(labels.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def network_checksum(network: nn.Module, architecture: str) -> str:
    """Return a checksum of the name of a network's architecture and of its weights."""
    return checksum(architecture, checksum_of(state_of(network)))
