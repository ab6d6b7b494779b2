"""Networks as users bring them: call one on any batch, find its last linear layer, and stream features and outputs."""

from mola.network.calling import (
    Batch,
    Inputs,
    LogitsOf,
    as_batch,
    batch_count,
    batches,
    call,
    check_loader,
    check_network,
    device_of,
    evaluating,
    one_batch,
    peek,
    run,
    to_device,
    unwrapped,
    without_autocast,
)
from mola.network.capture import Captured, Rows, capture, check_finite, check_logits, find_heads, stream
from mola.network.checksum import state_checksum
from mola.network.dense import IGNORE_INDEX, Layout, Positions, check_positions, drawn_positions
from mola.network.head import Head, find_head, head_by_name
from mola.network.resized import Resized

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Captured",
    "Head",
    "Inputs",
    "Layout",
    "LogitsOf",
    "Positions",
    "Resized",
    "Rows",
    "as_batch",
    "batch_count",
    "batches",
    "call",
    "capture",
    "check_finite",
    "check_loader",
    "check_logits",
    "check_network",
    "check_positions",
    "device_of",
    "drawn_positions",
    "evaluating",
    "find_head",
    "find_heads",
    "head_by_name",
    "one_batch",
    "peek",
    "run",
    "state_checksum",
    "stream",
    "to_device",
    "unwrapped",
    "without_autocast",
]
