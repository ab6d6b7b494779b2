"""Call any network on any batch, and leave no trace."""

from mola.networks.calling import Batch, Inputs, as_batch, call, device_of, one_batch, to_device, without_autocast
from mola.networks.visiting import undisturbed

__all__ = [
    "Batch",
    "Inputs",
    "as_batch",
    "call",
    "device_of",
    "one_batch",
    "to_device",
    "undisturbed",
    "without_autocast",
]
