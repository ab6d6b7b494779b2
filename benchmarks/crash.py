"""Kill tasks at random moments; check that no file is lost and that a rerun gives the same results as an uninterrupted run.

    python benchmarks/crash.py [save fit bench predict watch] [--kills 100] [--quick] [--case predict:17]

Each of five tasks is killed many times: `save` (overwrites an older posterior), `fit` (writes a checkpoint after every batch),
`bench` (runs the laboratory's `bench digits` on a small subset of the data), `predict` (runs `molaplace predict` and overwrites an older
file) and `watch` (runs `molaplace watch` and appends to a log). In half of the cases, SIGKILL is sent at a random time. In a quarter,
the process is killed just before a file operation; in the remaining quarter, it is killed during a write, when the file reaches a random
size.

After a kill, either the old or the new result must be complete (if not, the outcome is `half-written`). The second attempt must
succeed (if not, the outcome is `lost`) and produce the same bytes as an uninterrupted run (if not, the outcome is `differs`).
Hidden `.partial` files may remain.

If a case fails, the command to reproduce it is printed and the exit status is 1. Writes benchmarks/results/crash.json.
"""

import argparse
import collections
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from typer.testing import CliRunner

import molaplace as mola
from molaplace.cli import run as run_command
from molaplace.saving.weights import save_weights
from molaplace_lab import commands
from molaplace_lab.models import build_network

FAILURES = ("lost", "half-written", "differs")
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)).eval() for _ in range(2)]


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)
    return list(zip(inputs.split(count // 8), labels.split(count // 8), strict=True))


def digest(*parts: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in parts)).hexdigest()


def posterior_state() -> dict[str, str]:
    if not Path("posterior", "posterior.safetensors").exists():
        return {}
    loaded = mola.load("posterior", networks())
    return {"posterior": digest(loaded(batches(9, 40)[0][0]).detach(), loaded.log_evidence())}


def save(seed: int) -> None:
    mola.fit(networks(), batches(seed, 40), progress=False).save("posterior")


def fit() -> None:
    slow = (batch for batch in batches(3, 1200) if time.sleep(0.002) is None)
    options: dict[str, Any] = {"structure": "full", "checkpoint": "checkpoint", "checkpoint_every": 1}
    mola.fit(networks(), slow, progress=False, **options).save("posterior")


def command(line: str) -> None:
    code = run_command([*line.split(), "--quiet"])
    if code:
        raise RuntimeError(f"molaplace {line} ended with {code}")


def bench() -> None:
    sizes = "--runs 1 --components 2 --train-images 100 --test-images 30 --outliers 20"
    line = f"bench digits --train {sizes} --networks networks --cache activations --results results --quiet"
    result = CliRunner().invoke(commands.app, line.split(), catch_exceptions=False)
    if result.exit_code:
        raise RuntimeError(result.output)


def train() -> None:
    bench()
    shutil.rmtree("results")
    shutil.rmtree("activations")


def bench_state() -> dict[str, str]:
    checksums = {}
    for path in sorted(Path("results").rglob("*.json")):
        entries = {
            name: value for name, value in json.loads(path.read_bytes()).items() if name not in ("seconds", "sha256")
        }
        checksums[str(path)] = digest(json.dumps(entries, sort_keys=True))
    for path in sorted(Path("activations").rglob("[!.]*.safetensors")):
        checksums[str(path)] = digest(*(tensor.numpy() for _, tensor in sorted(load_file(path).items())))
    return checksums


def predict(data: str) -> None:
    command(f"predict fitted {data}.npz --output predictions.csv --probabilities")


def fit_and_predict() -> None:
    torch.manual_seed(0)
    save_weights(build_network("mlp", 10), Path("net.safetensors"))
    for seed, (name, count) in enumerate((("train", 40), ("val", 40), ("test", 60), ("many", 600))):
        rng = np.random.default_rng(seed)
        np.savez(f"{name}.npz", x=rng.random((count, 1, 8, 8)).astype(np.float32), y=rng.integers(0, 10, count))
    command("fit net.safetensors --network mlp --train train.npz --val val.npz --output fitted")
    predict("test")


def watch(data: str) -> None:
    command(f"watch fitted {data}.npz --log watch.jsonl --recent 100")


def fit_and_watch() -> None:
    fit_and_predict()
    watch("test")


def watch_state() -> dict[str, str]:
    lines = Path("watch.jsonl").read_bytes().split(b"\n")[:-1]  # a line that was cut off is completed by the next run
    entries = [{name: value for name, value in json.loads(line).items() if name != "time"} for line in lines]
    return {f"input {entry['inputs']}": digest(json.dumps(entry)) for entry in entries}


KINDS: dict[str, tuple[Callable[[], Any], ...]] = {
    "save": (lambda: save(3), lambda: save(4), posterior_state),
    "fit": (lambda: None, fit, posterior_state),
    "bench": (train, bench, bench_state),
    "predict": (
        fit_and_predict,
        lambda: predict("many"),
        lambda: {"csv": digest(Path("predictions.csv").read_bytes())},
    ),
    "watch": (fit_and_watch, lambda: watch("many"), watch_state),
}
"""The tasks. Each has three functions: one writes the initial files, one does the work, and one returns digests of the results."""


# --- kills ------------------------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")
"""Multiprocessing context whose child processes inherit all imported modules."""


def start(folder: Path, action: Callable[[], Any]) -> Any:
    def target() -> None:
        os.chdir(folder)
        warnings.simplefilter("ignore")
        action()

    process = FORK.Process(target=target)
    process.start()
    return process


def run(folder: Path, action: Callable[[], Any]) -> None:
    process = start(folder, action)
    process.join()
    if process.exitcode:
        raise RuntimeError("the traceback is above")


class Arena:
    """A task, the files that exist before it starts, and the result of an uninterrupted run."""

    def __init__(
        self, folder: Path, prepare: Callable[[], Any], act: Callable[[], Any], read: Callable[[], Any]
    ) -> None:
        self.act = act
        self.read = read
        self.folder = folder / "folder"
        self.template = folder / "template"
        self.template.mkdir()
        run(self.template, prepare)
        shutil.copytree(self.template, self.folder)
        self.old = self.state()
        began = time.monotonic()
        run(self.folder, act)
        self.seconds = time.monotonic() - began
        self.new = self.state()

    def state(self) -> dict[str, str]:
        queue = FORK.SimpleQueue()
        run(self.folder, lambda: queue.put(self.read()))
        return queue.get()

    def kill(self, rng: np.random.Generator) -> str | None:
        """Start the work and kill it; return a description of the kill, or None if the work finished first."""
        way = str(rng.choice(["time", "time", "operation", "write"]))
        moment = rng.uniform(0, self.seconds)
        size = int(2 ** rng.uniform(4, 18))
        left = int(rng.geometric(0.1))

        def count_down(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            left -= bool(event in EVENTS or opened)
            if left == 0:
                left = -1  # os.kill also raises an audit event
                os.kill(os.getpid(), signal.SIGKILL)

        def act() -> None:
            if way == "operation":
                sys.addaudithook(count_down)
            elif way == "write":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            self.act()

        process = start(self.folder, act)
        if way == "time":
            time.sleep(moment)
            process.kill()
        process.join()
        if process.exitcode > 0:
            raise RuntimeError("the traceback is above")
        how = {"time": f"after {moment:.3f} s", "operation": "before a file operation", "write": f"at byte {size}"}
        return how[way] if process.exitcode else None

    def case(self, seed: int) -> tuple[str, str]:
        """Kill the work once; return the outcome and a description of the kill."""
        rng = np.random.default_rng(seed)
        how = None
        failed = "half-written"
        while how is None:
            shutil.rmtree(self.folder)
            shutil.copytree(self.template, self.folder)
            how = self.kill(rng)
        try:
            state = self.state()
            if state != self.old and not (self.old.keys() <= state.keys() and state.items() <= self.new.items()):
                return failed, how
            failed = "lost"
            run(self.folder, self.act)
            return ("held" if self.state() == self.new else "differs"), how
        except RuntimeError:
            return failed, how


def campaign(kind: str, cases: range) -> dict[str, Any]:
    """Kill one task repeatedly and count the outcomes."""
    outcomes = collections.Counter[str]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder), *KINDS[kind])
        for index in tqdm(cases, desc=kind, disable=None):
            outcome, how = arena.case(index)
            outcomes[outcome] += 1
            if outcome in FAILURES:
                print(f"FAILED {kind}: {outcome}, killed {how}", flush=True)
                print(f"  python benchmarks/crash.py --case {kind}:{index}", flush=True)
    counts = {name: outcomes[name] for name in ("held", *FAILURES)}
    return {"kind": kind, "kills": len(cases), **counts, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds",
        nargs="*",
        default=list(KINDS),
        help="tasks to run (default: all); rows recorded for other tasks are kept",
    )
    parser.add_argument("--kills", type=int, default=100, help="number of kills for each task")
    parser.add_argument("--quick", action="store_true", help="kill each task once; write no file")
    parser.add_argument("--case", help="repeat a single kill, such as predict:17; write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # keep tqdm from starting a thread, which would make forking unsafe
    kinds = options.kinds
    cases = range(1 if options.quick else options.kills)
    if options.case:
        kind, _, index = options.case.partition(":")
        kinds = [kind]
        cases = range(int(index), int(index) + 1)
    rows = []
    for kind in kinds:
        rows.append(campaign(kind, cases))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    total = {name: sum(row[name] for row in rows) for name in ("kills", *FAILURES)}
    print(f"{total['kills']} kills: " + ", ".join(f"{total[name]} {name}" for name in FAILURES))
    if not (options.quick or options.case):
        others = [row for row in record.read("crash")["rows"] if row["kind"] not in kinds]
        record.write("crash", {"environment": record.environment(), "rows": others + rows})
    return int(any(total[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
