"""The processes of one job, as seen from one of them: what they tell each other, what they add up, and how they fail together.

Everything goes through object collectives and sums of torch.distributed. Every meeting begins with the same exchange, in which each
rank says whether it has failed, so a rank that raises meets the others once more and all of them raise its error. A process
that dies closes its connections, which ends the exchange on the others; torchrun ends what is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mola import errors
from mola.distributed.sharding import shard
from mola.errors import DistributedError, MolaError, OptionError

T = TypeVar("T")

PATIENCE = 24 * 3600.0
"""Seconds to wait for a process that is connected and does not arrive: parts of the data may be of very different sizes."""

REACHING = timedelta(minutes=10)
"""How long processes may take to find each other."""

LOOK = 0.2
"""Seconds between two looks at whether another rank has failed, while there is work to do."""

Failure = tuple[type[MolaError], str]
"""An error as every rank raises it: its kind and its message."""


class RemoteError(Exception):
    """A rank has failed, and every rank knows. Becomes the same error on each."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure[1])
        self.error = failure[0](failure[1])


class Team:
    """Processes that fit, tune and predict together. Made by `mola.join()`, or from a process group of your own.

    Every process calls the same functions in the same order, each with its own shard of the data. If one fails, all fail with
    its message.

    Args:
        group: the processes; None is the default group of torch.distributed, which must have been set up.
        patience: seconds to wait for a process that does not arrive. One that ended is noticed at once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, patience: float = PATIENCE) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError(
                "no process group: start the script with torchrun and use `with mola.join() as team:`, or call "
                "torch.distributed.init_process_group first."
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise OptionError(
                "this process is not in the process group: make the team in the processes of the group alone."
            )
        if not patience > 0:
            raise OptionError(f"patience must be a number of seconds above 0, got {patience!r}.")
        self._what, self._failures, self._looked = "nothing", 0, 0.0
        if self.size > 1:
            # A group of its own, of gloo also among GPUs: it is in nobody's way, and notices at once who has died.
            self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # torch 2.6 takes no None
            self._group = dist.new_group(
                self._ranks,
                timeout=timedelta(seconds=patience),
                backend="gloo",
                use_local_synchronization=self.size < dist.get_world_size(),
            )
            # A process returns from new_group when it has met the others, and they may still be meeting: were it to leave now, they
            # would find its door closed.
            dist.barrier(self._group)
            store = dist.distributed_c10d._get_default_store()
            name = f"mola/{self._group.group_name}"
            # Names of groups may come again: every rank counts its teams.
            self._store = dist.distributed_c10d.PrefixStore(
                f"{name}/{store.add(f'{name}/teams/{self.rank}', 1)}", store
            )

    @classmethod
    def alone(cls) -> Team:
        """A team of this one process, without any process group."""
        team = cls.__new__(cls)
        team.rank, team.size = 0, 1
        return team

    def __repr__(self) -> str:
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
        if self.size == 1:
            return
        if error is not None:
            # One that ends because another did says so in the same words: the news is that one, not this rank.
            passed_on = isinstance(error, DistributedError)
            told = str(error) if passed_on else f"rank {self.rank} ended: {type(error).__name__}: {error}"
            with suppress(RuntimeError):  # then nobody is left to be told
                self._store.compare_set("ended", "", told)
        # A group of some of the processes is left to the end of all: torch would give the next one of the same processes its name, and
        # one of them could find the address of another that is no longer there, and wait for it.
        elif dist.is_initialized() and self.size == dist.get_world_size():
            with suppress(ValueError):  # closed before
                dist.destroy_process_group(self._group)

    # --- failing together -------------------------------------------------------------------------------------------

    @contextmanager
    def work(self, what: str) -> Iterator[None]:
        """Work that all processes do together: when one fails inside, all fail, and with its message.

        Args:
            what: in words, for messages.

        Yields:
            Nothing. An error of mola's on one rank is raised on every rank; any other error is raised as it is where it happened,
            and as `DistributedError` elsewhere.
        """
        if self.size == 1:
            yield
            return
        self._what, self._looked = what, 0.0
        try:
            yield
            self._exchange()
        except RemoteError as remote:
            raise remote.error from remote.__cause__
        except Exception as error:
            try:
                self._meet_after(error)
            except RemoteError as remote:
                if (
                    isinstance(error, MolaError) and remote.__cause__ is None
                ):  # all met; else it was no use to tell them
                    raise remote.error from error
            raise
        except BaseException as error:
            # Interrupted: there may be no time for a meeting, but whoever looks is told.
            self.close(error)
            raise

    def _meet_after(self, error: Exception) -> None:
        # Tell the others that this rank has failed; raises what every rank raises, the error of the lowest rank that
        # failed.
        kind = next(
            one
            for one in (*type(error).__mro__, DistributedError)
            if one.__module__ == errors.__name__ and "__init__" not in vars(one)
        )
        words = str(error) if isinstance(error, kind) else f"{type(error).__name__}: {error}"
        # What is said of the ranks needs no rank that says it.
        message = words if words.startswith("rank ") else f"rank {self.rank} of {self.size}, {self._what}: {words}"
        self._ask(lambda: self._store.set(f"failed/{self._failures}", "yes"))
        self._exchange(failure=(kind, message))

    def check(self) -> None:
        """Inside `work`: stop if another process has failed meanwhile. Cheap enough for every batch."""
        if self.size == 1 or time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        if self._ask(lambda: self._store.check([f"failed/{self._failures}"])):
            self._exchange()
        if self._ask(lambda: self._store.check(["ended"])):
            raise RemoteError((DistributedError, self._store.get("ended").decode()))

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            message = (
                f"lost touch with the other processes during {self._what}: one of them has ended, or cannot be reached. Its own "
                f"messages say why; a process that was killed often ran out of memory. Start the job again (with checkpoint=... "
                f"a fit continues where it was)."
            )
            with suppress(RuntimeError):  # the store may have ended too
                if self._store.check(["ended"]):
                    message = self._store.get("ended").decode()
            raise RemoteError((DistributedError, message)) from error

    def _exchange(self, document: Any = None, failure: Failure | None = None) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        self._ask(lambda: dist.all_gather_object(everyone, (failure, document), group=self._group))
        failed = [one for one, _ in everyone if one is not None]
        if failed:
            self._failures += 1
            raise RemoteError(failed[0])
        return [one for _, one in everyone]

    # --- working together -------------------------------------------------------------------------------------------

    def collect(self, document: Any) -> list[Any] | None:
        """Inside `work`: the documents of all ranks in their order, on rank 0; None on the others."""
        if self.size == 1:
            return [document]
        everyone = self._exchange(document)
        return everyone if self.first else None

    def share(self, document: Any) -> Any:
        """Inside `work`: rank 0's document, on every rank."""
        return document if self.size == 1 else self._exchange(document if self.first else None)[0]

    def agree(self, document: dict[str, Any]) -> None:
        """Inside `work`: check that all ranks are doing the same.

        Args:
            document: what they do.
        """
        for rank, one in enumerate(self.collect(document) or ()):
            for name, expected in document.items():
                if one.get(name) != expected:
                    raise OptionError(
                        f"rank {rank} is not doing the same work as rank 0: {name} is {one.get(name)}, expected {expected}. Call "
                        f"the same functions with the same options in every process; only the data differ."
                    )

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Inside `work`: sums over all ranks, the same bits on every rank, on the device of the tensors.

        Args:
            tensors: of the same shapes and types on every rank.

        Returns:
            The sums.
        """
        if self.size == 1:
            return list(tensors)
        totals = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        self._exchange()
        for total in totals:
            # Added up on one rank and handed on: no rank can round otherwise than the others.
            self._ask(lambda total=total: dist.reduce(total, self._ranks[0], group=self._group))  # type: ignore[misc]
            self._ask(lambda total=total: dist.broadcast(total, self._ranks[0], group=self._group))  # type: ignore[misc]
        return [total.to(tensor.device) for total, tensor in zip(totals, tensors, strict=True)]

    def rows(self, tensor: Tensor | None) -> Tensor:
        """Inside `work`: the rows of all ranks in the order of the ranks, on every rank and in main memory.

        Args:
            tensor: (n, ...), with n and nothing else of its shape differing between ranks; None where there are no rows.

        Returns:
            All rows.
        """
        own = None if tensor is None else tensor.detach().cpu()
        forms = [own] if self.size == 1 else self._exchange(None if own is None else (own.dtype, own.shape))
        if all(form is None for form in forms):
            raise OptionError("expected rows on some rank, got none on any.")
        if self.size == 1 and own is not None:
            return own
        parts = {
            rank: torch.empty(form[1], dtype=form[0], device="cpu")
            for rank, form in zip(self._ranks, forms, strict=True)
            if form is not None
        }
        if own is not None:
            parts[self._ranks[self.rank]].copy_(own)
        # All ranks have the memory, or all fail here: one that failed alone would be waited for in the broadcasts.
        self._exchange()
        for rank, part in parts.items():
            # As bytes: gloo does not know every type of number.
            content = part.view(-1).view(torch.uint8)
            self._ask(lambda content=content, rank=rank: dist.broadcast(content, rank, group=self._group))  # type: ignore[misc]
        return torch.cat(list(parts.values()))


@contextmanager
def join(*, backend: str | None = None, patience: float = PATIENCE) -> Iterator[Team]:
    """Work with the other processes that torchrun started; a script started without it is a team of one.

    Args:
        backend: of torch.distributed's default group; None is NCCL where there are GPUs, with the process's own as current
            device, else gloo. The team itself uses gloo.
        patience: seconds to wait for a process that does not arrive. One that ended is noticed at once.

    Yields:
        The team. An error that ends this process inside the context ends the others too.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size != "1" and missing and not dist.is_initialized():
        raise OptionError(
            f"WORLD_SIZE is {size}, but {' and '.join(missing)} is not set. Start the script with torchrun."
        )
    own = size != "1" and not dist.is_initialized()
    if own:
        if torch.cuda.is_available() and backend != "gloo":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group(
            backend or ("nccl" if torch.cuda.is_available() else "gloo"), init_method="env://", timeout=REACHING
        )
    team = Team(patience=patience) if dist.is_initialized() else Team.alone()
    try:
        yield team
    except BaseException as error:
        # The group is not taken down in good order: processes that wait for each other would wait here again.
        team.close(error)
        raise
    team.close()
    if own:
        dist.destroy_process_group()
