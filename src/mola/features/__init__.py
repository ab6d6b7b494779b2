"""Networks and batches in, streams of (features, logits, labels) out. Hooks are always removed."""

from mola.features.gathering import check_finite
from mola.features.reading import batch_count, batches_of, check_loader, peek, stream
from mola.features.room import Lifted, Room, device_of_sums
from mola.features.watching import Features, Watched, capture, find_heads, first_passes

__all__ = [
    "Features",
    "Lifted",
    "Room",
    "Watched",
    "batch_count",
    "batches_of",
    "capture",
    "check_finite",
    "check_loader",
    "device_of_sums",
    "find_heads",
    "first_passes",
    "peek",
    "stream",
]
