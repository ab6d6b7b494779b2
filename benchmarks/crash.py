"""Work that is killed at random moments: no file may be lost, and doing it again must give the same bits.

    python benchmarks/crash.py [--kills 100] [--quick] [--case predict:17]

Four kinds of work, each killed many times: `save` (a posterior over an older one), `fit` (with a checkpoint after every batch),
`bench` (`mola bench digits` on few data) and `predict` (`mola predict` over an older file: .csv, .jsonl and .npz in turn).

Half of the kills are SIGKILL at a random time, a quarter just before a file operation, and a quarter in the middle of a write, when a
file reaches a random size. Afterwards the old result or the new one must be there, whole (`half-written` otherwise). The work is then
done again: it must succeed (`lost` otherwise) and give the same bits as without the kill (`differs`). Hidden `.partial` files of a
killed process may stay (`leftover`, not judged). Each case runs in a process forked from this one, which has imported everything.

Exits with 1 if a case fails, and prints how to repeat it. Writes benchmarks/results/crash.json.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import record
import torch
from safetensors.torch import load_file
from torch import nn
from tqdm.auto import tqdm
from typer.testing import CliRunner

import mola
from mola.app.cli import app
from mola.lab.models import build_network
from mola.saving.weights import save_weights

FAILURES, FAILED = ("lost", "half-written", "differs"), 3
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


class Work(NamedTuple):
    """What makes the folder before the work, the work, and what a reader finds: a dictionary of digests, by file."""

    prepare: Callable[[], None]
    act: Callable[[], None]
    state: Callable[[], dict[str, str]]


def networks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)).eval() for _ in range(2)]


def loader(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randn(count, 16, generator=generator), torch.randint(5, (count,), generator=generator)
    return list(zip(inputs.split(count // 8), labels.split(count // 8), strict=True))


def digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in arrays)).hexdigest()


def posterior_state() -> dict[str, str]:
    if not Path("posterior", "posterior.json").exists():
        return {}
    loaded = mola.load("posterior", networks())
    return {"posterior": digest(loaded(loader(9, 40)[0][0]), loaded.log_evidence())}


def save(seed: int) -> None:
    mola.fit(networks(), loader(seed, 40), progress=False).save("posterior")


def fit() -> None:
    batches = (batch for batch in loader(3, 1200) if time.sleep(0.002) is None)
    options: dict[str, Any] = {"structure": "full", "checkpoint": "kept", "checkpoint_every": 1, "progress": False}
    mola.fit(networks(), batches, **options).save("posterior")


def command(line: str) -> None:
    result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    if result.exit_code:
        raise RuntimeError(result.output)


def bench() -> None:
    sizes = "--runs 1 --components 2 --train-images 100 --test-images 30 --outliers 20"
    command(f"bench digits --train {sizes} --networks networks --cache activations --results results --quiet")


def trained() -> None:
    bench()
    shutil.rmtree("results")
    shutil.rmtree("activations")


def bench_state() -> dict[str, str]:
    found = {}
    for path in sorted(Path("results").rglob("*.json")):
        document = json.loads(path.read_bytes())
        kept = {name: value for name, value in document.items() if name not in ("seconds", "sha256")}
        found[str(path)] = json.dumps(kept, sort_keys=True)
    for path in sorted(Path("activations").rglob("[!.]*.safetensors")):
        found[str(path)] = digest(*(one.numpy() for _, one in sorted(load_file(path).items())))
    return found


def fitted(ending: str) -> None:
    torch.manual_seed(0)
    save_weights(build_network("mlp", 5), Path("net.safetensors"))
    for name, count in (("train", 40), ("val", 40), ("test", 60), ("many", 600)):
        rng = np.random.default_rng(count)
        np.savez(f"{name}.npz", x=rng.random((count, 1, 8, 8)).astype(np.float32), y=rng.integers(0, 5, count))
    command("fit --network mlp --weights net.safetensors --train train.npz --val val.npz --output fitted --quiet")
    predict("test", ending)


def predict(data: str, ending: str) -> None:
    command(f"predict fitted {data}.npz --output predictions{ending} --probabilities --quiet")


def predict_state(ending: str) -> dict[str, str]:
    path = Path(f"predictions{ending}")
    if ending != ".npz":
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    with np.load(path) as found:  # the archive holds the time it was made
        return {path.name: digest(*(found[name] for name in sorted(found.files)))}


KINDS: dict[str, tuple[Work, ...]] = {
    "save": (Work(lambda: save(3), lambda: save(4), posterior_state),),
    "fit": (Work(lambda: None, fit, posterior_state),),
    "bench": (Work(trained, bench, bench_state),),
    "predict": tuple(
        Work(lambda e=e: fitted(e), lambda e=e: predict("many", e), lambda e=e: predict_state(e))
        for e in (".csv", ".jsonl", ".npz")
    ),
}


class Arena:
    """One work, the files before it, and its result when nothing disturbs it."""

    def __init__(self, work: Work, place: Path) -> None:
        self.work, self.place, self.log = work, place, place / "log"
        self.folder, self.template = place / "folder", place / "template"
        self.template.mkdir(parents=True)
        self.must(self.template, work.prepare)
        self.old = self.state(self.template)
        shutil.copytree(self.template, self.folder)
        began = time.monotonic()
        self.must(self.folder, work.act)
        self.seconds, self.new = time.monotonic() - began, self.state(self.folder)

    def fork(self, folder: Path, action: Callable[[], Any]) -> int:
        """Start a child that does it in the folder; its output goes to the log."""
        child = os.fork()
        if child:
            return child
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(folder)
            warnings.simplefilter("ignore")
            action()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)
        os._exit(0)

    def must(self, folder: Path, action: Callable[[], Any]) -> None:
        if os.waitpid(self.fork(folder, action), 0)[1]:
            raise RuntimeError(self.log.read_text())

    def state(self, folder: Path) -> dict[str, str]:
        output = self.place / "state.json"
        self.must(folder, lambda: output.write_text(json.dumps(self.work.state())))
        return json.loads(output.read_text())

    def kill(self, rng: np.random.Generator) -> str:
        """Do the work and end it somewhere; returns how."""
        way = str(rng.choice(["time", "time", "operation", "write"]))
        moment, size, left = rng.uniform(0, 1.05 * self.seconds), int(2 ** rng.uniform(4, 18)), int(rng.geometric(0.1))

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            left -= bool(event in WRITES or opened)
            if left == 0:
                left = -1  # the kill is an event, too
                os.kill(os.getpid(), signal.SIGKILL)

        def act() -> None:
            if way == "operation":
                sys.addaudithook(hook)
            elif way == "write":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            self.work.act()

        child = self.fork(self.folder, act)
        if way == "time":
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)  # a process that ended is a zombie until it is waited for
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == FAILED:
            raise RuntimeError(self.log.read_text())
        how = {"time": f"after {moment:.3f} s", "operation": "before a file operation", "write": f"at byte {size}"}
        return how[way] if code < 0 else "after the work"

    def case(self, seed: int) -> tuple[str, str, str]:
        """One kill: its outcome, how the work was killed, and the message of a failure."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.template, self.folder)
        how = self.kill(np.random.default_rng(seed))
        try:
            found = self.state(self.folder)
            if found != self.old and not (self.old.keys() <= found.keys() and found.items() <= self.new.items()):
                return "half-written", how, "neither the old result, nor whole files of the new one"
        except RuntimeError as error:
            return "half-written", how, str(error)
        try:
            self.must(self.folder, self.work.act)
            if self.state(self.folder) != self.new:
                return "differs", how, "doing it again gave different bits"
        except RuntimeError as error:
            return "lost", how, str(error)
        return ("held, after the work" if how == "after the work" else "held"), how, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="of each kind of work")
    parser.add_argument("--quick", action="store_true", help="one kill of each; writes no file")
    parser.add_argument("--case", help="one kill, such as predict:17; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a thread, which would be forked
    kinds, cases = list(KINDS), range(1 if options.quick else options.kills)
    if options.case:
        kinds, cases = [options.case.partition(":")[0]], range(int(options.case.partition(":")[2]), sys.maxsize)[:1]
    rows, total = [], collections.Counter[str]()
    for kind in kinds:
        outcomes, began, leftover = collections.Counter[str](), time.monotonic(), 0
        with tempfile.TemporaryDirectory() as place:
            arenas = [Arena(work, Path(place) / str(index)) for index, work in enumerate(KINDS[kind])]
            for index in tqdm(cases, desc=kind, disable=None):
                arena = arenas[index % len(arenas)]
                outcome, how, words = arena.case(index)
                outcomes[outcome] += 1
                leftover += any(arena.folder.rglob(".*.partial"))
                if outcome in FAILURES:
                    print(f"FAILED {kind}: {outcome}, killed {how}: {words.strip()[-2000:]}")
                    print(f"  python benchmarks/crash.py --case {kind}:{index}", flush=True)
        counts = {name: outcomes[name] for name in ("held", "held, after the work", *FAILURES)}
        seconds = round(time.monotonic() - began, 1)
        rows.append({"kind": kind, "kills": len(cases), **counts, "leftover": leftover, "seconds": seconds})
        total += outcomes
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    print(f"{total.total()} kills: " + ", ".join(f"{total[name]} {name}" for name in FAILURES))
    if not (options.quick or options.case):
        record.write("crash", {"environment": record.environment(), "rows": rows})
    return int(any(total[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
