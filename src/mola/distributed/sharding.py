"""One process's part of the data: every datum in exactly one part, in the same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler, Subset

from mola.errors import OptionError, warn


def shard(data: Any, rank: int, world: int) -> Any:
    """The part of the data that one of `world` processes reads: each datum in exactly one part.

    Parts are consecutive and in the order of the ranks, their sizes differ by at most one, and none is padded, as torch's
    `DistributedSampler` does by repeating data: repeated data would be counted twice.

    Args:
        data: a dataset with `len` and indices, a list (of data or of batches), a tensor or array, or a DataLoader that reads such
            a dataset from start to end.
        rank: of this process, from 0.
        world: number of processes.

    Returns:
        A list, tensor or array for one of these; a `Subset` for a dataset, a DataLoader for a DataLoader. It may be empty.
    """
    if not (isinstance(rank, int) and isinstance(world, int) and 0 <= rank < world):
        raise OptionError(f"expected a rank from 0 to world - 1, got rank {rank!r} of world {world!r}.")
    if isinstance(data, DataLoader):
        return _shard_loader(data, rank, world)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        raise OptionError(
            "expected a dataset, got a pair of tensors: shard torch.utils.data.TensorDataset(inputs, labels)."
        )
    if isinstance(data, (Mapping, str)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise OptionError(
            f"expected a dataset with len() and indices, a list or a DataLoader, got {type(data).__name__}. A stream has to be "
            f"divided at its source, or by itertools.islice(stream, rank, None, world) if every rank reads it in the same order."
        )
    part = range(len(data) * rank // world, len(data) * (rank + 1) // world)
    if isinstance(data, (list, tuple, range, Tensor, np.ndarray)):
        return data[part.start : part.stop]
    return Subset(data, part)


def _shard_loader(loader: DataLoader[Any], rank: int, world: int) -> DataLoader[Any]:
    problem = None
    if isinstance(loader.dataset, IterableDataset):
        problem = "it reads a stream"
    elif type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) is not SequentialSampler:
        problem = f"it samples by {type(loader.sampler).__name__}, and each process would draw an order of its own"
    elif loader.drop_last:
        problem = "drop_last leaves out other data on every rank"
    if problem is not None:
        raise OptionError(
            f"this DataLoader cannot be divided: {problem}. Divide its dataset: DataLoader(mola.shard(dataset, rank, world), "
            f"batch_size=...); fitting needs no shuffling."
        )
    return DataLoader(
        shard(loader.dataset, rank, world),
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def check_sampler(loader: Any) -> None:
    """Warn of a loader whose sampler gives some data to two processes, or to none."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    count, world = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    uneven = count % world
    if uneven:
        what = f"leaves out {uneven}" if sampler.drop_last else f"repeats {world - uneven}"
        warn(
            f"the loader's DistributedSampler {what} of {count} data to make {world} equal parts. mola needs no equal parts: use "
            f"mola.shard(dataset, rank, world), which gives each datum to exactly one process."
        )
