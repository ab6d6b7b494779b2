"""Fit, tune and predict with several processes: each process reads its own shard, and sums are added over all processes.

Every process calls the same functions in the same order. If a process fails, it ends with its exception, torchrun stops the other
processes, and the fit can resume from its checkpoint.
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

from mola.errors import OptionError, warn

if dist.is_available():
    # Functions of torch.distributed.nn store, as a default argument, the process group that exists when the module is imported. The
    # group's threads would then outlive destroy_process_group and could abort Python at exit. The module is therefore imported here,
    # before any group exists; otherwise torch.optim, for example, would import it later.
    import torch.distributed.nn.functional


class Team:
    """The processes of a torch.distributed group, and the rank of this process among them.

    Args:
        group: process group; None means the default group, made by `join` or torch.distributed.init_process_group.
    """

    rank: int
    size: int

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "there is no process group. Start the script with torchrun and use `with mola.distributed.join() as team:`, or call "
                "torch.distributed.init_process_group first."
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        if self.size > 1 and "gloo" not in dist.get_backend_config(group):
            # Objects and sums are sent from main memory, which NCCL cannot read.
            partial = self.size < dist.get_world_size()
            ranks = dist.get_process_group_ranks(group)
            self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=partial)
            # Without this barrier, a process could exit and close its connection while other processes are still connecting.
            dist.barrier(self._group)

    @classmethod
    def single(cls) -> Team:
        """Make a team that consists of this process alone and needs no process group."""
        team = cls.__new__(cls)
        team.rank, team.size, team._group = 0, 1, None
        return team

    def __repr__(self) -> str:
        return f"Team(rank {self.rank} of {self.size})"

    @property
    def first(self) -> bool:
        """True for rank 0, the only rank that prints and writes files."""
        return self.rank == 0

    def shard(self, data: Any) -> Any:
        """Return this process's shard of a dataset or list; see `mola.distributed.shard`."""
        return shard(data, self.rank, self.size)

    def collect(self, document: Any) -> list[Any]:
        """Return the documents of all ranks in rank order, on every rank."""
        if self.size == 1:
            return [document]
        documents: list[Any] = [None] * self.size
        dist.all_gather_object(documents, document, group=self._group)
        return documents

    def share(self, document: Any) -> Any:
        """Return rank 0's document, on every rank."""
        return self.collect(document if self.first else None)[0]

    def agree(self, document: Mapping[str, Any], what: str) -> None:
        """Raise `OptionError` on every rank unless all ranks pass the same named options; the message begins with `what`."""
        documents = self.collect(dict(document))
        expected = documents[0]
        for rank, got in enumerate(documents):
            for name in {**expected, **got}:
                if got.get(name) != expected.get(name):
                    raise OptionError(
                        f"{what}: rank {rank} differs from rank 0 in {name}: expected {expected.get(name)!r}, got "
                        f"{got.get(name)!r}. Call the same functions with the same options in every process; only the data may differ."
                    )

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sum tensors over all ranks in float64, and convert each sum to its tensor's dtype and device.

        The sums are equal on all ranks, bit for bit.
        """
        if self.size == 1:
            return list(tensors)
        totals = [tensor.detach().to("cpu", torch.float64, copy=True).contiguous() for tensor in tensors]
        for total in totals:
            dist.all_reduce(total, group=self._group)
        return [total.to(tensor.dtype).to(tensor.device) for total, tensor in zip(totals, tensors, strict=True)]

    def gather(self, rows: Tensor | None) -> Tensor:
        """Return the rows (n, ...) of all ranks in rank order, in main memory. n may differ between ranks; None means no rows."""
        own = None if rows is None else rows.detach().cpu().contiguous()
        forms = self.collect(None if own is None else (own.dtype, tuple(own.shape)))
        kinds = {(form[0], form[1][1:]) for form in forms if form is not None}
        if len(kinds) != 1:
            found = "none on any" if not kinds else " and ".join(f"{dtype} of (n, *{shape})" for dtype, shape in kinds)
            raise OptionError(f"expected rows of one dtype and shape on at least one rank, got {found}.")
        parts = []
        for rank, form in enumerate(forms):
            if form is None:
                continue
            part = own if rank == self.rank and own is not None else torch.empty(form[1], dtype=form[0], device="cpu")
            if self.size > 1 and part.numel():  # sent as bytes, because Gloo does not support every dtype
                dist.broadcast(part.view(-1).view(torch.uint8), group=self._group, group_src=rank)
            parts.append(part)
        return torch.cat(parts)


@contextmanager
def join(*, backend: str | None = None) -> Iterator[Team]:
    """Set up torchrun's process group and yield its team; without torchrun, yield a team of one process.

    Args:
        backend: backend of torch.distributed. None means Gloo if there are no GPUs; with GPUs, it means Gloo and NCCL, and each
            process makes its own GPU the current device.
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
    # There is no finally clause: after an exception, destroying the group could block on ranks that are waiting for this rank.
    yield Team()
    dist.destroy_process_group()


def shard(data: Any, rank: int, size: int) -> Any:
    """Select the part of the data that one of `size` processes reads. Each datum is in exactly one part.

    Parts are consecutive, in rank order, and their sizes differ by at most one. Parts are not padded with repeated data, because
    repeated data would be counted twice. A part may be empty.

    Args:
        data: a dataset with `len` and indices, a list of examples or batches, a tensor or an array.
        rank: rank of this process, from 0.
        size: number of processes.

    Returns:
        A slice for a list, tensor or array; a `Subset` for a dataset.
    """
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise OptionError(f"expected a rank from 0 to size - 1, got rank {rank!r} of size {size!r}.")
    divisible = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, (tuple, Mapping, str)) or not divisible:
        raise OptionError(
            f"expected a dataset with len() and indices, or a list of batches, got {type(data).__name__}. For a "
            "DataLoader, shard its dataset: DataLoader(team.shard(dataset), batch_size=...). Combine two tensors in a "
            "TensorDataset(inputs, labels). Split a stream at its source, or with itertools.islice(stream, rank, None, size)."
        )
    part = range(len(data) * rank // size, len(data) * (rank + 1) // size)
    if isinstance(data, (list, range, Tensor, np.ndarray)):
        return data[part.start : part.stop]
    return Subset(data, part)


def check_sampler(loader: Any) -> None:
    """Warn if the loader's DistributedSampler drops data or gives some data to two processes."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and len(sampler.dataset) % sampler.num_replicas:  # type: ignore[arg-type]
        warn(
            "the loader's DistributedSampler drops or repeats data to make parts of equal size. mola does not need equal sizes. "
            "Use team.shard(dataset), which gives each datum to exactly one process."
        )
