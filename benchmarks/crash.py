"""Work that is killed at random moments.

`make crash`, or

    python benchmarks/crash.py [--kills 100] [--seed 0] [--quick] [--only predict] [--case predict:17]

Four kinds of work, each killed so many times:

  save     a posterior saved over an older one, by `posterior.save` and by `mola fit` (job and posterior)
  fit      a fit with a checkpoint after every batch
  bench    `mola bench digits`, on a few data
  predict  `mola predict` over an older file: .csv, .jsonl and .npz in turn

Half of the kills are SIGKILL at a moment drawn from the time that the work takes, a quarter SIGKILL just before one of its file
operations (opening for writing, fsync, rename, remove, mkdir, rmdir), and a quarter come in the middle of a write: no file may grow
past a number of bytes that is drawn, and the kernel ends the process there.

After each kill the folder must hold the old result or the new one, whole (`half-written` otherwise). Then the work is done again:
it must succeed (`lost` otherwise), give the same bits as without the kill (`differs`), and leave no file that only the killed
process knew (`leftover`). Kills that came after the work was done count, too, and are reported.

Each case runs in a process forked from this one, which has imported everything: that takes milliseconds. Fails if a case does, and
says how to repeat it. Writes benchmarks/results/crash.json.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from safetensors.torch import load_file
from torch import nn
from tqdm.auto import tqdm

import mola
from mola.app.jobs.fit import run_fit
from mola.app.jobs.folder import open_posterior
from mola.app.jobs.job import Job
from mola.app.jobs.predict import run_predict
from mola.lab.models import build_network
from mola.lab.order import Order, carry_out
from mola.lab.suite import DataOptions
from mola.lab.suites.registry import find_suite
from mola.saving.weights_files import save_weights

KILLS = 100
FAILURES = ("lost", "half-written", "differs", "leftover")
FAILED, DONE = 3, 0
"""Exit codes of a child."""


# --- the work -----------------------------------------------------------------------------------------------------------


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)).eval()


def arrays(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 16)).astype(np.float32), rng.integers(0, 5, count)


def loader(seed: int, count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = (torch.from_numpy(part) for part in arrays(seed, count))
    return list(zip(x.split(size), y.split(size), strict=True))


class Work(ABC):
    """Something that writes files, in a folder of its own."""

    name: str

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Make what is there before the work begins."""

    @abstractmethod
    def act(self, folder: Path) -> None:
        """The work."""

    @abstractmethod
    def state(self, folder: Path) -> Any:
        """What a reader finds, as something that can be compared; raises where a file is damaged."""

    def whole(self, found: Any, old: Any, new: Any) -> bool:
        """Whether what a reader finds after a kill is one of the whole results."""
        return found in (old, new)


def digest(*tensors: Any) -> str:
    """Of numbers, to the bit."""
    found = hashlib.sha256()
    for one in tensors:
        found.update(np.ascontiguousarray(one).tobytes())
    return found.hexdigest()


class Save(Work):
    """`posterior.save` over an older posterior."""

    name = "save"

    def prepare(self, folder: Path) -> None:
        self.fit(2.0, 3).save(folder / "posterior")

    def fit(self, precision: float, seed: int) -> mola.MoLA:
        return mola.fit([network(0), network(1)], loader(seed, 40, 10), prior_precision=precision, progress=False)

    def act(self, folder: Path) -> None:
        self.fit(0.5, 4).save(folder / "posterior")

    def state(self, folder: Path) -> Any:
        loaded = mola.load(folder / "posterior", [network(0), network(1)])
        return digest(loaded(torch.from_numpy(arrays(9, 20)[0])), loaded.log_evidence())


class SaveByCommand(Work):
    """`mola fit` into the folder of an older posterior, of other preparation."""

    name = "save by command"

    def prepare(self, folder: Path) -> None:
        for index in range(2):
            torch.manual_seed(index)
            save_weights(build_network("mlp", 5), folder / f"net{index}.safetensors")
        for name, seed, count in (
            ("train", 3, 40),
            ("other", 4, 50),
            ("val", 5, 40),
            ("test", 6, 60),
            ("many", 7, 600),
        ):
            rng = np.random.default_rng(seed)
            x, y = rng.random((count, 1, 8, 8)).astype(np.float32), rng.integers(0, 5, count)
            np.savez(folder / f"{name}.npz", x=x, y=y)
        self.fit(folder, "train", "diag")

    def fit(self, folder: Path, train: str, structure: str) -> None:
        job = Job(
            network=("mlp",),
            weights=("net0.safetensors", "net1.safetensors"),
            train=f"{train}.npz",
            val="val.npz",
            structure=structure,
        )
        os.chdir(folder)
        run_fit(job, Path("fitted"), bundle=True)

    def act(self, folder: Path) -> None:
        self.fit(folder, "other", "kron")

    def state(self, folder: Path) -> Any:
        os.chdir(folder)
        output = folder / "seen.npz"
        run_predict(open_posterior(Path("fitted")), "test.npz", output, probabilities=True)
        with np.load(output) as found:
            numbers = digest(*(found[name] for name in sorted(found.files) if found[name].dtype.kind != "U"))
        output.unlink()
        return numbers


class Fit(Work):
    """A fit that keeps its sums after every batch."""

    name = "fit"

    def prepare(self, folder: Path) -> None:
        (folder / "out").mkdir()

    def act(self, folder: Path) -> None:
        seen = 0

        def batches() -> Any:
            nonlocal seen
            for batch in loader(3, 1200, 150):
                seen += 1
                time.sleep(0.002)
                yield batch

        posterior = mola.fit(
            [network(0), network(1)],
            batches(),
            structure="full",
            progress=False,
            checkpoint=folder / "kept",
            checkpoint_every=1,
        )
        posterior.save(folder / "out" / "posterior")

    def state(self, folder: Path) -> Any:
        if not (folder / "out" / "posterior" / "posterior.json").exists():
            return None
        loaded = mola.load(folder / "out" / "posterior", [network(0), network(1)])
        return digest(loaded(torch.from_numpy(arrays(9, 20)[0])), loaded.log_evidence()), (folder / "kept").exists()


class Bench(Work):
    """`mola bench digits`, with networks that are trained already."""

    name = "bench"

    def order(self, folder: Path) -> Order:
        return Order(
            suite=find_suite("digits"),
            runs=1,
            components=2,
            groups="main",
            network=None,
            networks=folder / "networks",
            results=folder / "results",
            cache=folder / "activations",
            options=DataOptions(
                directory=None,
                train=100,
                outliers=20,
                test=30,
                download=False,
                normalisation=None,
                corruptions="paper",
                conventions="consistent",
            ),
            train=True,
            device="cpu",
            fresh=False,
            swag="",
            mimo="",
        )

    def prepare(self, folder: Path) -> None:
        carry_out(self.order(folder), lambda doing, done: None)  # trains the networks
        shutil.rmtree(folder / "results")
        shutil.rmtree(folder / "activations")

    def act(self, folder: Path) -> None:
        carry_out(self.order(folder), lambda doing, done: None)

    def state(self, folder: Path) -> Any:
        """Every record but for the time it took, and every file of activations."""
        found = {}
        for path in sorted((folder / "results").rglob("*.json")):
            document = json.loads(path.read_bytes())
            for name in ("seconds", "sha256"):  # the checksum is of all of it, the seconds included
                document.pop(name, None)
            found[str(path.relative_to(folder))] = json.dumps(document, sort_keys=True)
        for path in sorted((folder / "activations").rglob("*")):
            if path.is_file() and not path.name.endswith(".partial"):
                tensors = load_file(path)  # what is said about them beside stands in any order
                found[str(path.relative_to(folder))] = digest(*(tensors[name].numpy() for name in sorted(tensors)))
        return found

    def whole(self, found: Any, old: Any, new: Any) -> bool:
        """What is there already is what will be there."""
        return all(new.get(name) == content for name, content in found.items())


class Predict(Work):
    """`mola predict` over an older file."""

    def __init__(self, ending: str) -> None:
        self.name, self.ending = f"predict {ending}", ending

    def prepare(self, folder: Path) -> None:
        SaveByCommand().prepare(folder)
        self.predict(folder, "test.npz")

    def predict(self, folder: Path, data: str) -> None:
        os.chdir(folder)
        fitted = open_posterior(Path("fitted"))
        run_predict(fitted, data, Path(f"predictions{self.ending}"), probabilities=True)

    def act(self, folder: Path) -> None:
        self.predict(folder, "many.npz")

    def state(self, folder: Path) -> Any:
        path = folder / f"predictions{self.ending}"
        if self.ending != ".npz":
            return hashlib.sha256(path.read_bytes()).hexdigest()
        with np.load(path) as found:  # the archive knows when it was made
            return digest(*(found[name] for name in sorted(found.files)))


KINDS: dict[str, Callable[[], list[Work]]] = {
    "save": lambda: [Save(), SaveByCommand()],
    "fit": lambda: [Fit()],
    "bench": lambda: [Bench()],
    "predict": lambda: [Predict(".csv"), Predict(".jsonl"), Predict(".npz")],
}


# --- killing ------------------------------------------------------------------------------------------------------------

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def watch_files(told: Callable[[], None]) -> None:
    """Call `told` before every operation that changes files, in this process and for good."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WRITES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        ):
            told()

    fsync = os.fsync

    def watched(descriptor: int) -> None:
        told()
        fsync(descriptor)

    os.fsync = watched  # it has no audit event
    sys.addaudithook(hook)


def fork(action: Callable[[], None], log: Path) -> int:
    """Start a child that does it, and ends with `DONE` or `FAILED`; its words go to the log."""
    child = os.fork()
    if child:
        return child
    try:
        with open(log, "w", encoding="utf-8") as words:
            os.dup2(words.fileno(), 1)
            os.dup2(words.fileno(), 2)
        warnings.simplefilter("ignore")
        action()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
    os._exit(DONE)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Arena:
    """One kind of work, what was there before it, and what it gives when nobody disturbs it."""

    def __init__(self, work: Work, place: Path) -> None:
        self.work, self.place, self.log = work, place, place.with_suffix(".log")
        self.folder, self.template = place / "folder", place / "template"
        self.template.mkdir(parents=True)
        self.must(lambda: work.prepare(self.template))
        self.old = self.state(self.template)
        self.seconds = float("inf")
        for _ in range(2):
            self.reset()
            began = time.monotonic()
            self.must(lambda: work.act(self.folder))
            self.seconds = min(self.seconds, time.monotonic() - began)
        self.new = self.state(self.folder)
        self.largest = max(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        self.reset()
        counted = place / "operations"
        self.must(lambda: self.count(counted))
        self.operations = int(counted.read_text())

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template, self.folder)

    def must(self, action: Callable[[], None]) -> None:
        if wait(fork(action, self.log)) != DONE:
            raise RuntimeError(self.log.read_text())

    def count(self, output: Path) -> None:
        operations = 0

        def told() -> None:
            nonlocal operations
            operations += 1

        watch_files(told)
        self.work.act(self.folder)
        Path(output).write_text(str(operations))

    def state(self, folder: Path) -> Any:
        """What a reader finds, read in a process of its own."""
        output = self.place / "state.json"

        def read() -> None:
            found = self.work.state(folder)
            output.write_text(json.dumps(found))

        output.unlink(missing_ok=True)
        self.must(read)
        return json.loads(output.read_text())

    def which(self, found: Any) -> str:
        """Of several files, those that are other ones."""
        if not (isinstance(found, dict) and isinstance(self.new, dict)):
            return ""
        return ": " + ", ".join(
            sorted(name for name in found.keys() | self.new.keys() if found.get(name) != self.new.get(name))
        )

    def kill(self, rng: np.random.Generator) -> str:
        """Do the work, and end it somewhere; says how."""
        way = str(rng.choice(["time", "time", "operation", "write"]))
        moment, operation = float(rng.uniform(0, 1.05 * self.seconds)), int(rng.integers(1, self.operations + 1))
        size = int(rng.integers(1, self.largest))

        def act() -> None:
            tempfile.tempdir = str(self.place / "scratch")
            Path(tempfile.tempdir).mkdir(exist_ok=True)
            if way == "operation":
                left = operation

                def told() -> None:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

                watch_files(told)
            elif way == "write":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            self.work.act(self.folder)

        child = fork(act, self.log)
        if way == "time":
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)  # a process that ended is a zombie until it is waited for
        code = wait(child)
        shutil.rmtree(self.place / "scratch", ignore_errors=True)
        if code == FAILED:
            raise RuntimeError(self.log.read_text())
        where = {
            "time": f"after {moment:.3f} s",
            "operation": f"before file operation {operation}",
            "write": f"at byte {size} of a file",
        }
        return f"{way}: {where[way]}" + ("" if code < 0 else " (it was done)")

    def case(self, seed: int) -> tuple[str, str, str]:
        """One kill, and what came of it: the outcome, how it was killed, and what there is to say."""
        self.reset()
        how = self.kill(np.random.default_rng(seed))
        try:
            found = self.state(self.folder)
        except RuntimeError as error:
            return "half-written", how, str(error)
        if not self.work.whole(found, self.old, self.new):
            return "half-written", how, "what is there is neither the old result nor the new one"
        try:
            self.must(lambda: self.work.act(self.folder))
            again = self.state(self.folder)
        except RuntimeError as error:
            return "lost", how, str(error)
        if again != self.new:
            return "differs", how, f"doing it again gave other bits{self.which(again)}"
        left = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.partial"))
        if left:
            return "leftover", how, ", ".join(left)
        return ("held, after the work" if how.endswith("done)") else "held"), how, ""


def campaign(kind: str, kills: int, seed: int, place: Path, only: int | None = None) -> dict[str, Any]:
    """So many kills of one kind of work."""
    outcomes: collections.Counter[str] = collections.Counter()
    ways: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    began = time.monotonic()
    arenas = [Arena(work, place / work.name.replace(" ", "-")) for work in KINDS[kind]()]
    for index in tqdm(range(kills) if only is None else [only], desc=kind, disable=None):
        arena = arenas[index % len(arenas)]
        outcome, how, words = arena.case(seed + index)
        outcomes[outcome] += 1
        ways[how.split(":")[0]] += 1
        if outcome in FAILURES:
            short = [line for line in words.strip().splitlines() if line.strip()][-1:] or [""]
            failures.append(
                {"case": f"{kind}:{index}", "work": arena.work.name, "outcome": outcome, "how": how, "words": short[0]}
            )
            if only is not None:
                print(words)
    return {
        "kind": kind,
        "kills": sum(outcomes.values()),
        **{name: outcomes[name] for name in ("held", "held, after the work", *FAILURES)},
        "ways": dict(ways),
        "operations": {arena.work.name: arena.operations for arena in arenas},
        "seconds": round(time.monotonic() - began, 1),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each kind of work")
    parser.add_argument("--seed", type=int, default=0, help="of the first kill of each kind; the others count on")
    parser.add_argument("--quick", action="store_true", help="one kill of each; writes no file")
    parser.add_argument("--only", choices=list(KINDS), help="one kind of work; writes no file")
    parser.add_argument("--case", help="one kill, such as predict:17, with the whole of its words")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a thread, which would be forked
    kills = 1 if options.quick else options.kills
    kinds, only = [options.only] if options.only else list(KINDS), None
    if options.case:
        kinds, only = [options.case.partition(":")[0]], int(options.case.partition(":")[2])
    rows = []
    here = Path.cwd()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as place:
            rows.append(campaign(kind, kills, options.seed, Path(place), only))
        os.chdir(here)
    print(f"{'work':>10} {'kills':>6} {'held':>6} {'after':>6}  " + "  ".join(FAILURES) + "   seconds")
    for row in rows:
        counts = "  ".join(f"{row[name]:>{len(name)}}" for name in FAILURES)
        print(
            f"{row['kind']:>10} {row['kills']:>6} {row['held']:>6} {row['held, after the work']:>6}  {counts}   {row['seconds']:7.0f}"
        )
    for failure in (failure for row in rows for failure in row["failures"]):
        print(f"FAILED {failure['work']}: {failure['outcome']}, killed {failure['how']}: {failure['words'][:300]}")
        print(f"  python benchmarks/crash.py --seed {options.seed} --case {failure['case']}")
    total = {name: sum(row[name] for row in rows) for name in FAILURES}
    print(
        f"{sum(row['kills'] for row in rows)} kills: " + ", ".join(f"{count} {name}" for name, count in total.items())
    )
    if not (options.quick or options.only or options.case):
        record.write("crash", {"environment": record.environment(), "seed": options.seed, "rows": rows})
    return int(any(total.values()))


if __name__ == "__main__":
    sys.exit(main())
