"""Call any network on any batch, and leave no trace.

Find and check the last linear layer of any network, by watching one forward pass.

Networks and batches in, streams of (features, logits, labels) out. Hooks are always removed.
"""

from mola.network.calling import Batch, Inputs, as_batch, call, device_of, one_batch, to_device, without_autocast
from mola.network.features import (
    Features,
    Lifted,
    RowBuffer,
    Watched,
    batch_count,
    batches_of,
    capture,
    check_finite,
    check_loader,
    device_of_sums,
    find_heads,
    first_passes,
    peek,
    stream,
)
from mola.network.head import Carried, Head, LayerCall, check_logits, find_head, first_pass, head_by_name
from mola.network.visiting import undisturbed, visited

__all__ = [
    "Batch",
    "Carried",
    "Features",
    "Head",
    "Inputs",
    "LayerCall",
    "Lifted",
    "RowBuffer",
    "Watched",
    "as_batch",
    "batch_count",
    "batches_of",
    "call",
    "capture",
    "check_finite",
    "check_loader",
    "check_logits",
    "device_of",
    "device_of_sums",
    "find_head",
    "find_heads",
    "first_pass",
    "first_passes",
    "head_by_name",
    "one_batch",
    "peek",
    "stream",
    "to_device",
    "undisturbed",
    "visited",
    "without_autocast",
]
