"""The processes of one job, as seen from one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mola.distributed.control import Control, RemoteError
from mola.distributed.sharding import shard
from mola.errors import MolaError, OptionError

__all__ = ["Team"]

PATIENCE = 30.0
"""Seconds without a sign of life after which a process counts as lost."""


class Team:
    """Processes that fit, tune and predict together. Made by `mola.join()`, or from a process group of your own.

    Every process calls the same functions in the same order, each with its own shard of the data. If one fails, all fail with
    its message.

    Args:
        group: the processes; None is the default group of torch.distributed, which must have been set up.
        patience: seconds without a sign of life after which a process counts as lost.

    Raises:
        OptionError: if there is no process group, or this process is not in it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, patience: float = PATIENCE) -> None:
        """Join the group's other processes.

        Raises:
            OptionError: if there is no process group, or this process is not in it.
        """
        if not dist.is_available() or not dist.is_initialized():
            message = (
                "no process group: start the script with torchrun and use `with mola.join() as team:`, or call "
                "torch.distributed.init_process_group first."
            )
            raise OptionError(message)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            message = "this process is not in the process group: make the team in the processes of the group alone."
            raise OptionError(message)
        if not patience > 0:
            message = f"patience must be a number of seconds above 0, got {patience!r}."
            raise OptionError(message)
        self._group = group
        self._root = 0 if group is None else dist.get_global_rank(group, 0)
        nccl = "gloo" not in dist.get_backend_config(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._control: Control | None = None
        if self.size > 1:
            self._control = Control(_own_store(group, self.rank), self.rank, self.size, patience)

    @classmethod
    def alone(cls) -> Team:
        """A team of this one process, without any process group."""
        team = cls.__new__(cls)
        team.rank, team.size, team._control = 0, 1, None
        return team

    def __repr__(self) -> str:
        """Which process of how many."""
        return f"Team(rank {self.rank} of {self.size})"

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.rank == 0

    def shard(self, data: Any) -> Any:
        """This process's part of a dataset, list or sequential DataLoader; see `mola.shard`."""
        return shard(data, self.rank, self.size)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the team; with an error, the others are told and end as well."""
        if self._control is not None:
            self._control.close(error)

    # --- working together -------------------------------------------------------------------------------------------

    @contextmanager
    def work(self, what: str) -> Iterator[None]:
        """Work that all processes do together: when one fails inside, all fail, and with its message.

        Args:
            what: in words, for messages.

        Yields:
            Nothing. What one of mola's errors ends on one rank, it ends on every rank; an error that is not mola's is raised as it
            is where it happened, and as `DistributedError` elsewhere.
        """
        if self._control is None:
            yield
            return
        self._control.begin(what)
        try:
            yield
            self._control.finish()
        except RemoteError as told:
            self._control.leave(told.report)
            raise told.as_error() from told.__cause__
        except BaseException as error:
            known = RemoteError(self._control.report(error))
            self._control.leave(known.report)
            if not isinstance(error, MolaError):
                raise
            raise known.as_error() from error

    def check(self) -> None:
        """Inside `work`: stop if another process has failed meanwhile. Cheap enough for every batch."""
        if self._control is not None:
            self._control.check()

    def collect(self, document: Any) -> list[Any] | None:
        """Inside `work`: the JSON documents of all ranks in their order, on rank 0; None on the others."""
        return [document] if self._control is None else self._control.collect(document)

    def share(self, document: Any) -> Any:
        """Inside `work`: rank 0's JSON document, on every rank."""
        return document if self._control is None else self._control.share(document)

    def agree(self, document: dict[str, Any]) -> None:
        """Inside `work`: see that all ranks are doing the same.

        Args:
            document: what they do, as JSON.

        Raises:
            OptionError: on every rank, if one does something else.
        """
        for rank, one in enumerate(self.collect(document) or ()):
            for name, expected in document.items():
                if one.get(name) != expected:
                    message = (
                        f"rank {rank} is not doing the same work as rank 0: {name} is {one.get(name)}, expected {expected}. Call "
                        f"the same functions with the same options in every process; only the data differ."
                    )
                    raise OptionError(message)

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inside `work`: sums over all ranks, the same bits on every rank, where the tensors are.

        Args:
            tensors: of the same shapes and types on every rank.

        Returns:
            The sums.
        """
        if self._control is None:
            return list(tensors)
        self._control.meet()
        totals = []
        try:
            for tensor in tensors:
                # Added up on one rank and handed on: no rank can round otherwise than the others.
                total = tensor.detach().to(self._device, copy=True).contiguous()
                dist.reduce(total, self._root, group=self._group)
                dist.broadcast(total, self._root, group=self._group)
                totals.append(total.to(tensor.device))
        except RuntimeError as error:
            self._control.broken(error)
        return totals

    def rows(self, tensor: Tensor | None) -> Tensor:
        """Inside `work`: the rows of all ranks in the order of the ranks, on every rank and in main memory.

        Args:
            tensor: (n, ...), with n and nothing else of its shape differing between ranks; None where there are no rows.

        Returns:
            All rows.

        Raises:
            OptionError: if no rank has rows.
        """
        if self._control is None:
            if tensor is None:
                message = "expected rows, got none."
                raise OptionError(message)
            return tensor.cpu()
        own = None if tensor is None else [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        forms = self.share(self.collect(own))
        if not any(forms):
            message = "expected rows on some rank, got none on any."
            raise OptionError(message)
        parts = []
        try:
            for rank, form in enumerate(forms):
                if form is None:
                    continue
                kind, *shape = form
                part = torch.empty(shape, dtype=getattr(torch, kind), device=self._device)
                if rank == self.rank and tensor is not None:
                    part.copy_(tensor.detach())
                # As bytes: every type of number is known to every backend then.
                source = rank if self._group is None else dist.get_global_rank(self._group, rank)
                dist.broadcast(part.view(-1).view(torch.uint8), source, group=self._group)
                parts.append(part.cpu())
        except RuntimeError as error:
            self._control.broken(error)
        return torch.cat(parts)


def _own_store(group: dist.ProcessGroup | None, rank: int) -> Any:
    """The store of the processes, with keys that no other team uses.

    The same group may form several teams, one after the other: every rank counts its own.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    name = "world" if group is None or group is dist.group.WORLD else group.group_name
    generation = store.add(f"mola/{name}/teams/{rank}", 1)
    return dist.distributed_c10d.PrefixStore(f"mola/{name}/{generation}", store)
