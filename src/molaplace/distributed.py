"""Fit, tune and predict with several processes: each process reads its own shard of the data, and the processes combine their sums.

Every process calls the same functions in the same order. If a process raises an exception, it exits, torchrun stops the other
processes, and the fit can be resumed from its checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, Subset

from molaplace.errors import OptionError, warn

if dist.is_available():
    # Functions in torch.distributed.nn keep, as a default argument, the process group that existed when the module was imported. The
    # threads of that group would outlive destroy_process_group and could abort Python at exit. Import the module here, before any
    # group exists, because torch.optim, for example, may import it later.
    import torch.distributed.nn.functional


class Team:
    """The processes of a torch.distributed group, and the rank of this process among them.

    Args:
        group: process group; by default, the one created by `join` or torch.distributed.init_process_group.
    """

    rank: int
    size: int

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "there is no process group. Start the script with torchrun and use `with mola.distributed.join() as team:`, or call "
                "torch.distributed.init_process_group first."
            )
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        if self.size > 1 and "gloo" not in dist.get_backend_config(group):
            # A Gloo group is needed because objects and sums are sent from main memory, which NCCL cannot read.
            is_subgroup = self.size < dist.get_world_size()
            ranks = dist.get_process_group_ranks(group)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=is_subgroup)
            # Without this barrier, a process could exit and close its connection while other processes are still connecting.
            dist.barrier(self._group)

    @classmethod
    def single(cls) -> Team:
        """Make a team of this process alone, without a process group."""
        team = cls.__new__(cls)
        team.rank = 0
        team.size = 1
        team._group = None
        return team

    def __repr__(self) -> str:
        return f"Team(rank {self.rank} of {self.size})"

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the only rank that prints or writes files."""
        return self.rank == 0

    def shard(self, data: Any) -> Any:
        """Return this process's shard of a dataset or list; see `mola.distributed.shard`."""
        return shard(data, self.rank, self.size)

    def collect(self, document: Any) -> list[Any]:
        """Return, on every rank, the documents of all ranks in rank order."""
        if self.size == 1:
            return [document]
        documents: list[Any] = [None] * self.size
        dist.all_gather_object(documents, document, group=self._group)
        return documents

    def share(self, document: Any) -> Any:
        """Return rank 0's document on every rank."""
        return self.collect(document if self.first else None)[0]

    def agree(self, document: Mapping[str, Any], what: str) -> None:
        """Raise an `OptionError` on every rank unless all ranks pass the same named options; the message begins with `what`."""
        documents = self.collect(dict(document))
        expected = documents[0]
        for rank, got in enumerate(documents):
            for name in {**expected, **got}:
                if got.get(name) != expected.get(name):
                    raise OptionError(
                        f"{what}: {name} differs between rank {rank} and rank 0: expected {expected.get(name)!r}, got "
                        f"{got.get(name)!r}. Call the same functions with the same options in every process; only the data may differ."
                    )

    def unique(self, indices: Any) -> Any:
        """Return indices of this process's data, as a number or a tensor, that no other process has."""
        return indices + (self.rank << 40)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sum each tensor over all ranks in float64; each sum keeps its tensor's dtype and device.

        The sums are bitwise identical on all ranks.
        """
        if self.size == 1:
            return list(tensors)
        totals = [tensor.detach().to("cpu", torch.float64, copy=True).contiguous() for tensor in tensors]
        for total in totals:
            dist.all_reduce(total, group=self._group)
        return [total.to(tensor.dtype).to(tensor.device) for total, tensor in zip(totals, tensors, strict=True)]

    def gather(self, rows: Tensor | None) -> Tensor:
        """Return, on every rank, the rows (n, ...) of all ranks in rank order, as a tensor on the CPU.

        The number of rows may differ between ranks. A rank without rows passes None.
        """
        parts = [part for part in self.collect(None if rows is None else rows.detach().cpu()) if part is not None]
        kinds = {(part.dtype, tuple(part.shape[1:])) for part in parts}
        if len(kinds) != 1:
            raise OptionError(
                f"expected rows on at least one rank, all with the same dtype and row shape; got {kinds or 'none'}."
            )
        return torch.cat(parts)


@contextmanager
def join(*, backend: str | None = None) -> Iterator[Team]:
    """Set up torchrun's process group and yield its team; without torchrun, yield a team of one process.

    Args:
        backend: torch.distributed backend. The default is Gloo, plus NCCL on machines with GPUs. On those machines, each process
            makes its own GPU the current device unless `backend` is "gloo".
    """
    if dist.is_available() and dist.is_initialized():
        yield Team()
        return
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Team.single()
        return
    if torch.cuda.is_available() and backend != "gloo":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"))
    # There is no finally clause because, after an exception, destroying the group could block on ranks that are waiting for this one.
    yield Team()
    dist.destroy_process_group()


def shard(data: Any, rank: int, size: int) -> Any:
    """Return the part of the data for the process with the given rank. Each datum is in exactly one part.

    Parts are consecutive ranges in rank order, and their sizes differ by at most one. Parts are not padded: repeated data would be
    counted twice. A part may be empty.

    Args:
        data: a list of examples or batches, a tensor, an array, or a dataset that supports `len` and indexing.
        rank: rank of this process, starting from 0.
        size: number of processes.

    Returns:
        A slice of a list, tensor or array, or a `Subset` of a dataset.
    """
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise OptionError(f"must be from 0 to size - 1, got rank {rank!r} with size {size!r}.", argument="rank")
    divisible = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, (tuple, Mapping, str)) or not divisible:
        raise OptionError(
            f"must be a list of batches, or a dataset that supports len() and indexing; got {type(data).__name__}. For a "
            "DataLoader, shard its dataset: DataLoader(team.shard(dataset), batch_size=...). Combine separate inputs and "
            "labels in a TensorDataset(inputs, labels). Split a stream at its source, or with itertools.islice(stream, "
            "rank, None, size).",
            argument="data",
        )
    part = range(len(data) * rank // size, len(data) * (rank + 1) // size)
    if isinstance(data, (list, range, Tensor, np.ndarray)):
        return data[part.start : part.stop]
    return Subset(data, part)


def check_sampler(loader: Any) -> None:
    """Warn if the loader's DistributedSampler drops data or gives the same data to two processes."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and len(sampler.dataset) % sampler.num_replicas:  # type: ignore[arg-type]
        warn(
            "the loader's DistributedSampler drops or repeats data so that all parts have equal size; molaplace does not require this. "
            "Use team.shard(dataset), which gives each datum to exactly one process."
        )
