"""What processes tell each other besides sums: that they are alive, that they have arrived, and what went wrong.

All of it goes through the process group's key-value store, so a process that waits can look around: it sees an error that
another one reported, and a process that gives no sign of life any more. Collectives, which can do neither, are entered only
when all have arrived.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from mola import errors
from mola.errors import DistributedError, MolaError

__all__ = ["Control", "RemoteError"]

T = TypeVar("T")

LOOK = 0.2
"""Seconds between two looks at what others report, while there is work to do."""

SLEEP = (0.001, 0.05)
"""Seconds between two looks while waiting: at first, and after a while."""

PIECE = 2**22
"""Letters that are kept under one key: torch's store ends the connection of a process that sends more than 8 MB."""

KINDS: dict[str, type[MolaError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, MolaError) and "__init__" not in vars(kind)
}
"""Our kinds of errors that are made of a message."""


class RemoteError(Exception):
    """Somebody has failed, and everybody knows. Becomes the same error on every rank."""

    def __init__(self, report: dict[str, Any]) -> None:
        """Keep the report."""
        super().__init__(report["message"])
        self.report = report

    def as_error(self) -> MolaError:
        """The error to raise: of the kind that the rank which failed met, where that is one of ours."""
        return KINDS.get(self.report["kind"], DistributedError)(self.report["message"])


class Control:
    """One process's view of all.

    Args:
        store: of torch.distributed, shared by all processes, with keys of the team's own.
        rank: of this one.
        size: number of processes.
        patience: seconds without a sign of life after which a process counts as lost.
    """

    def __init__(self, store: Any, rank: int, size: int, patience: float) -> None:
        """Start to give signs of life."""
        self.rank, self.size, self.patience = rank, size, patience
        self._what, self._work, self._step = "nothing", 0, 0
        self._store = store
        self._beats: dict[int, tuple[int, float]] = {}
        self._looked = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mola-sign-of-life", daemon=True)
        self._thread.start()

    # --- signs of life ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._over.wait(min(1.0, self.patience / 8)):
            try:
                self._store.add(f"beat/{self.rank}", 1)
            except RuntimeError:
                return  # the store is gone; whoever waits next will notice

    def _lost(self) -> list[int]:
        """Ranks that gave no sign of life for longer than patience allows, watched since the first call.

        Rank 0 watches all and the others watch rank 0: with everybody watching everybody, a thousand processes would keep the
        store busy with nothing else.
        """
        now, lost = time.monotonic(), []
        for other in range(1, self.size) if self.rank == 0 else (0,):
            count = self._ask(lambda key=f"beat/{other}": self._store.add(key, 0))  # type: ignore[misc]
            before = self._beats.get(other)
            if before is None or before[0] != count:
                self._beats[other] = (count, now)
            elif now - before[1] > self.patience:
                lost.append(other)
        return lost

    def close(self, error: BaseException | None = None) -> None:
        """Give no more signs of life; with an error, tell the others why."""
        if error is not None and not self._over.is_set():
            message = f"rank {self.rank} ended: {type(error).__name__}: {error}"
            with suppress(RuntimeError):  # then nobody is left to be told
                self._store.compare_set("ended", "", json.dumps({"kind": "DistributedError", "message": message}))
        self._over.set()
        self._thread.join()

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            message = (
                f"lost touch with the other processes during {self._what}: the one that keeps their store (rank 0 or torchrun) "
                f"has ended. Its own messages say why; start the job again."
            )
            raise DistributedError(message) from error

    def begin(self, what: str) -> None:
        """Begin a piece of work that all do together: every rank calls the same ones in the same order."""
        self._what, self._work, self._step = what, self._work + 1, 0
        self._looked = 0.0

    def _key(self, name: str) -> str:
        return f"{self._work}/{name}"

    def check(self) -> None:
        """Stop if another rank has failed; cheap enough for every batch.

        Raises:
            RemoteError: with what it reported.
        """
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        for key in (self._key("failed"), "ended"):
            if self._ask(lambda key=key: self._store.check([key])):  # type: ignore[misc]
                raise RemoteError(json.loads(self._ask(lambda key=key: self._store.get(key))))  # type: ignore[misc]

    def report(self, error: BaseException) -> dict[str, Any]:
        """Tell all that this rank failed; gives what all will know, which is another's report if that came first."""
        kind = type(error).__name__
        words = str(error) if kind in KINDS else f"{kind}: {error}"
        # What is said of the ranks needs no rank that says it.
        message = words if words.startswith("rank ") else f"rank {self.rank} of {self.size}, {self._what}: {words}"
        return self._post({"kind": kind, "message": message})

    def _post(self, report: dict[str, Any]) -> dict[str, Any]:
        try:
            first = self._store.compare_set(self._key("failed"), "", json.dumps(report))
        except RuntimeError:
            return report  # nobody is left to be told
        return json.loads(first)

    def leave(self, report: dict[str, Any]) -> None:
        """After a failure, wait until all who live know of it: a process that ends may take the store, or the job, along."""
        living = self.size - len(report.get("lost", ()))
        with suppress(RuntimeError):  # then the store has gone already
            self._store.add(self._key("left"), 1)
            end = time.monotonic() + self.patience
            while time.monotonic() < end and self._store.add(self._key("left"), 0) < living:
                time.sleep(SLEEP[1])

    def broken(self, error: RuntimeError) -> NoReturn:
        """A collective failed: find out who is missing.

        Args:
            error: as the backend raised it.

        Raises:
            RemoteError: with the rank that was lost, or with the backend's own words.
        """
        end = time.monotonic() + 1.5 * self.patience
        while time.monotonic() < end:
            self._look()
            time.sleep(SLEEP[1])
        message = f"the processes lost touch with each other during {self._what}: {error}"
        raise RemoteError(self._post({"kind": "DistributedError", "message": message})) from error

    # --- meetings ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """While waiting: has somebody failed, or been lost?

        Raises:
            RemoteError: if so.
        """
        self._looked = 0.0
        self.check()
        lost = self._lost()
        if lost:
            names = ", ".join(f"rank {other}" for other in lost)
            message = (
                f"{names} of {self.size} lost during {self._what}: no sign of life for {self.patience:g} s. The process was killed or "
                f"its machine cannot be reached; a killed process often ran out of memory. Start the job again (with "
                f"checkpoint=... a fit goes on where it was)."
            )
            raise RemoteError(self._post({"kind": "DistributedError", "message": message, "lost": lost}))

    def _await(self, key: str, count: int) -> None:
        pause, longest = SLEEP
        looked = time.monotonic()
        while self._ask(lambda: self._store.add(key, 0)) < count:
            if time.monotonic() - looked > LOOK:
                self._look()
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def meet(self) -> None:
        """Wait until every rank has arrived. `RemoteError` if one has failed or is lost."""
        self._step += 1
        key = self._key(f"meeting/{self._step}")
        self._ask(lambda: self._store.add(key, 1))
        self._await(key, self.size)

    def finish(self) -> None:
        """The end of a piece of work: all have done it. Rank 0, which may hold the store, goes last."""
        self.meet()
        key = self._key("passed")
        if self.rank == 0:
            self._await(key, self.size - 1)
        else:
            self._ask(lambda: self._store.add(key, 1))

    def collect(self, document: Any) -> list[Any] | None:
        """The JSON documents of all ranks in their order, on rank 0; None on the others."""
        key = self._key(f"document/{self._step + 1}")
        self._put(f"{key}/{self.rank}", document)
        self.meet()
        if self.rank != 0:
            return None
        # Read by nobody else, and forgotten: many rounds of large documents must not pile up.
        return [self._get(f"{key}/{rank}", forget=True) for rank in range(self.size)]

    def share(self, document: Any) -> Any:
        """Rank 0's JSON document, on every rank."""
        key = self._key(f"shared/{self._step + 1}")
        if self.rank == 0:
            self._put(key, document)
        self.meet()
        return self._get(key)

    # --- documents --------------------------------------------------------------------------------------------------

    def _put(self, key: str, document: Any) -> None:
        """Keep a document of any length in the store; what follows its first piece comes first."""
        text = json.dumps(document)  # never empty, and all of it ASCII
        first, *others = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        for number, piece in enumerate(others):
            self._ask(lambda number=number, piece=piece: self._store.set(f"{key}/{number}", piece))  # type: ignore[misc]
        self._ask(lambda: self._store.set(key, f"{len(others)} {first}"))

    def _get(self, key: str, *, forget: bool = False) -> Any:
        """A document that was kept; with `forget`, the store has it no longer."""
        count, _, first = self._ask(lambda: self._store.get(key)).decode("ascii").partition(" ")
        keys = [f"{key}/{number}" for number in range(int(count))]
        pieces = [self._ask(lambda one=one: self._store.get(one)).decode("ascii") for one in keys]  # type: ignore[misc]
        for one in (key, *keys) if forget else ():
            self._ask(lambda one=one: self._store.delete_key(one))  # type: ignore[misc]
        return json.loads("".join([first, *pieces]))
