"""The log of `molaplace watch`: a line of JSON for each batch, and the state of the watch in a folder beside it.

A batch is written in two steps: first the state, which contains the batch's line, replaces the old state atomically; then the line is
appended to the log. If the process is killed between the steps, or while it writes the line, the next run completes the log from the
state. If it is killed before, the batch has not been counted, and the next run reads it again. One process at a time holds the lock
of the log.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from molaplace.errors import MolaError, StorageError
from molaplace.monitoring.watching import KIND, SCHEMA, Watch
from molaplace.saving.files import read_folder, write_folder
from molaplace.saving.schema import Optional, check

LINE = {
    "time": str,
    **dict.fromkeys(("batch", "inputs", "size"), int),
    "digests": [int],
    "scores": [float],
    "alarm": bool,
    **dict.fromkeys(("evidence", "threshold"), float),
    "began": Optional(int),
    **dict.fromkeys(("accuracy", "low", "high", "strange"), Optional(float)),
    "reason": Optional(str),
    "strangest": [{"name": str, "score": float}],
}
"""Schema of a line."""


class WatchLog:
    """A log and the state of its watch, locked while the context is open."""

    def __init__(self, path: Path, new: Watch) -> None:
        self.path = path
        self.state = state_of(path)
        self.lines: list[dict[str, Any]] = []
        self.digests: set[int] = set()
        """Digests of the inputs in the log."""
        self.watch = new

    def __enter__(self) -> Self:
        """Lock the log, complete it from the state, and read both."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        try:
            _lock(self._file, self.path)
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        complete, _, rest = content.rpartition(b"\n")
        self.lines = [self._parsed(line, number) for number, line in enumerate(complete.splitlines(), 1)]
        self.digests = {digest for line in self.lines for digest in line["digests"]}
        if not self.state.exists():
            if content:
                raise StorageError(
                    f"{self.path} has lines, but {self.state}, which holds the ranks of its scores, is missing. Restore it, or choose "
                    f"another --log."
                )
            return
        document, tensors = read_folder(self.state, KIND, {**SCHEMA, "line": LINE})
        saved = Watch.unpack(document, tensors)
        differences = saved.differences(self.watch)
        if differences:
            raise StorageError(
                f"{self.path} was begun with other settings. What differs: {', '.join(differences)}. Pass those with which it was "
                f"begun, or choose another --log."
            )
        self.watch = saved
        last = document["line"]
        if rest or not self.lines or self.lines[-1] != last:
            # The line of the last batch is missing or was cut off.
            if len(self.lines) != last["batch"] - 1 or not _encoded(last).startswith(rest):
                raise StorageError(
                    f"{self.path} does not fit {self.state}: expected {last['batch']} lines, the last for {last['inputs']:,} "
                    f"inputs. Restore both, or choose another --log."
                )
            self._file.truncate(len(content) - len(rest))
            self._append(last)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            check(entry, LINE, "")
            if entry["batch"] != number:
                raise ValueError(f"expected batch {number}, got batch {entry['batch']}")
        except (ValueError, RecursionError) as error:
            reason = error.message.rstrip(".") if isinstance(error, MolaError) else error
            raise StorageError(
                f"{self.path} is damaged in line {number}: {reason}. Restore the file, or choose another --log."
            ) from error
        return entry

    def _append(self, line: dict[str, Any]) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(_encoded(line))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.lines.append(line)
        self.digests.update(line["digests"])

    def add(self, line: dict[str, Any]) -> None:
        """Write the state of the watch and the line of the batch that it has just read."""
        document, tensors = self.watch.pack()
        write_folder(self.state, document | {"line": line}, tensors)
        self._append(line)


def state_of(path: Path) -> Path:
    """Return the folder of the state of a log's watch."""
    return path.with_name(f"{path.name}.state")


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _lock(file: IO[bytes], path: Path) -> None:
    # The operating system releases the lock when the process ends, however it ends.
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StorageError(
            f"another process is writing to {path}. Wait until it has finished, or choose another --log."
        ) from error
