"""Fit, tune, predict, evaluate and bench on one process, on two and four, and on two nodes; and a node that dies.

    python benchmarks/two_nodes.py [--keep FOLDER]

Every layout does the same commands on the same data in float64, and what it writes is compared with what one process writes:

  1      one process
  2, 4   torchrun with so many processes on this machine
  2x2    two nodes with two processes each. A node is a network namespace with an address of its own (10.77.0.1 and 10.77.0.2), joined
         by a pair of virtual Ethernet interfaces: `ip netns` and `ip link`, which need root. Where that is not allowed, the message of
         the system is kept and two addresses of the loopback interface (127.0.0.1 and 127.0.0.2) stand in for nodes.

Then `mola fit --checkpoint` runs on two nodes, and all processes of the second are killed once every process has a checkpoint.
The first node must end by itself with mola's own line, and the same command must go on from the checkpoints to the sums of a fit that
nobody interrupted. Writes benchmarks/results/two_nodes.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from safetensors.numpy import load_file

from mola.saving.weights_files import save_weights

NODES = ("mola-a", "mola-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29477
BAR = 1e-12
BATCHES, ROWS, SECONDS = 1600, 128, 0.01
"""Of the fit that is interrupted: batches, rows in each, and seconds that reading one takes."""

MODULE = f"""
import time
import numpy as np
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 5)).double()

def slow():
    "Batches that take their time, as batches of images do."
    generator = torch.Generator().manual_seed(0)
    for index in range({BATCHES}):
        time.sleep({SECONDS})
        inputs = torch.randn({ROWS}, 32, generator=generator, dtype=torch.float64)
        yield inputs, (inputs[:, :5] + inputs[:, 5:10]).argmax(1)
"""


def prepare(folder: Path) -> None:
    """Three networks, and arrays to fit, tune, test and be surprised by."""
    (folder / "nodes_models.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    import nodes_models

    rng = np.random.default_rng(0)
    for name, count in (("train", 2001), ("val", 403), ("test", 501)):
        inputs = rng.standard_normal((count, 32))
        np.savez(folder / f"{name}.npz", x=inputs, y=(inputs[:, :5] + inputs[:, 5:10]).argmax(1))
    np.savez(folder / "strange.npz", x=3 * rng.standard_normal((200, 32)) + 2)
    data = np.load(folder / "train.npz")
    inputs, labels = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    for seed in range(3):
        torch.manual_seed(seed)
        network = nodes_models.build()
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-2)
        for _ in range(60):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), labels).backward()
            optimiser.step()
        save_weights(network, folder / "weights" / f"{seed}.safetensors")


def fit_options(train: str, output: str, *more: str) -> list[str]:
    weights = [f"weights/{seed}.safetensors" for seed in range(3)]
    return ["fit", *weights, "--network", "nodes_models:build", "--train", train, *more, "--output", output, "--quiet"]


def commands(layout: str) -> list[list[str]]:
    """What every layout does."""
    posterior, test = f"posterior-{layout}", ["--test", "test.npz", "--ood", "strange.npz"]
    # A few digits: what is compared is the numbers, not how good they are.
    bench = ["bench", "digits", "--networks", "digits", "--components", "2", "--quiet"]
    bench += ["--train-images", "300", "--test-images", "100", "--outliers", "50"]
    return [
        fit_options("train.npz", posterior, "--val", "val.npz", "--batch-size", "64"),
        ["predict", posterior, "test.npz", "--probabilities", "--output", f"predictions-{layout}.npz", "--quiet"],
        ["evaluate", posterior, *test, "--output", f"report-{layout}", "--quiet"],
        [*bench, "--results", f"results-{layout}", "--cache", f"cache-{layout}"],
    ]


def work(layout: str) -> None:
    """One process of a layout: the commands one after the other, by processes that have met once."""
    from mola.__main__ import main as mola_command

    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    seconds = {}
    for options in commands(layout):
        sys.argv = ["mola", *options]
        started, complained = time.monotonic(), io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(complained):
            try:
                mola_command()
            except SystemExit as end:
                code = int(end.code or 0)
        if code:
            raise SystemExit(f"{' '.join(options)}: {complained.getvalue()}")
        seconds[options[0]] = round(time.monotonic() - started, 2)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(f"seconds-{layout}.json").write_text(json.dumps(seconds))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# --- nodes --------------------------------------------------------------------------------------------------------------


def make_nodes() -> str | None:
    """Two namespaces that reach each other; what the system says, if it does not allow them."""
    remove_nodes()
    steps = [f"ip netns add {node}" for node in NODES]
    steps.append(f"ip link add {NODES[0]} type veth peer name {NODES[1]}")
    for node, address in zip(NODES, ADDRESSES, strict=True):
        steps += [f"ip link set {node} netns {node}", f"ip netns exec {node} ip addr add {address}/24 dev {node}"]
        steps += [f"ip netns exec {node} ip link set {name} up" for name in (node, "lo")]
    for step in steps:
        try:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{step}: {error}"
        if done.returncode:
            remove_nodes()
            return f"{step}: {done.stderr.strip()}"
    return None


def remove_nodes() -> None:
    for node in NODES:
        subprocess.run(["ip", "netns", "delete", node], capture_output=True, check=False)


def start(
    arguments: list[str], folder: Path, processes: int, nodes: int, namespaces: bool
) -> list[subprocess.Popen[str]]:
    """Start torchrun on each node; one process without it."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    started = []
    for node in range(nodes):
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--nnodes={nodes}"]
        # The namespaces' addresses are reached from inside them only: processes of one node meet on the machine's own.
        address = ADDRESSES[0] if namespaces and nodes > 1 else "127.0.0.1"
        torchrun += [f"--node-rank={node}", f"--master-addr={address}", f"--master-port={PORT}"]
        command = [*torchrun, *arguments] if processes * nodes > 1 else [sys.executable, *arguments]
        own = {}
        if nodes > 1:
            # Gloo listens on the address that the host's name has, which is another node's or nobody's here: name the interface.
            own = {"GLOO_SOCKET_IFNAME": NODES[node] if namespaces else "lo"}
            command = ["ip", "netns", "exec", NODES[node], *command] if namespaces else command
        started.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return started


# --- what is compared ---------------------------------------------------------------------------------------------------


def numbers_of(folder: Path, layout: str) -> dict[str, np.ndarray]:
    """All numbers that a layout wrote, by command and name."""
    found: dict[str, np.ndarray] = {}
    for path in (folder / f"posterior-{layout}").glob("*.safetensors"):
        kind = re.sub(r"-[0-9a-f]{16}", "", path.stem)
        found |= {f"fit/{kind}/{name}": one for name, one in in_one_order(load_file(path)).items()}
    document = json.loads((folder / f"posterior-{layout}" / "posterior.json").read_text())
    found["tune/lambda"] = np.array([part["prior_precision"] for part in document["components"]])
    with np.load(folder / f"predictions-{layout}.npz") as arrays:
        found |= {f"predict/{name}": arrays[name] for name in arrays.files if arrays[name].dtype.kind in "fib"}
    found |= flat("evaluate", json.loads((folder / f"report-{layout}" / "numbers.json").read_text()))
    for path in sorted((folder / f"results-{layout}" / "digits").glob("*/run-*.json")):
        found |= flat(f"bench/{path.parent.name}", json.loads(path.read_text()))
    return found


def in_one_order(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What was kept of each validation datum, sorted: processes keep their data together, and no threshold depends on the order."""
    columns = {name: one for name, one in tensors.items() if name.startswith("datum.")}
    if not columns:
        return tensors
    order = np.lexsort([columns["datum.confidence"], columns["datum.entropy"]])
    return tensors | {name: one[order] for name, one in columns.items()}


TIMES = ("seconds", "environment", "made", "version", "versions", "created", "posterior")


def flat(place: str, value: Any) -> dict[str, np.ndarray]:
    """Numbers of a document by their place; times and versions are left out."""
    if isinstance(value, dict):
        return {
            k: v for name, one in value.items() if name not in TIMES for k, v in flat(f"{place}/{name}", one).items()
        }
    if isinstance(value, list):
        return {k: v for index, one in enumerate(value) for k, v in flat(f"{place}/{index}", one).items()}
    return {place: np.array(float(value))} if isinstance(value, (int, float)) else {}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    """By command: the largest difference, relative to the largest number of the same array or 1."""
    if set(one) != set(other):
        raise SystemExit(f"other numbers were written: {sorted(set(one) ^ set(other))[:5]}")
    worst: dict[str, float] = {}
    for name, expected in one.items():
        command = name.partition("/")[0]
        a, b = (np.nan_to_num(array.astype(np.float64)) for array in (expected, other[name]))
        gap = float(np.abs(a - b).max(initial=0) / max(1.0, float(np.abs(a).max(initial=0))))
        worst[command] = max(worst.get(command, 0.0), gap)
    return worst


# --- a node that dies ---------------------------------------------------------------------------------------------------


def kept_batches(folder: Path) -> list[int]:
    """How many batches are in the checkpoint of each process."""
    documents = sorted((folder / "under-way").glob("rank-*/posterior.json"))
    found = [json.loads(path.read_text()) for path in documents]
    return [next(int(one[name]) for name in ("batches", "count") if name in one) for one in found]


def dying_node(folder: Path, namespaces: bool) -> dict[str, Any]:
    untuned = ("--rule", "evidence")  # the sums are what is compared; other rules would ask for validation data
    arguments = ["-m", "mola", *fit_options("nodes_models:slow", "interrupted", *untuned, "--checkpoint", "under-way")]
    whole = start(["-m", "mola", *fit_options("nodes_models:slow", "whole", *untuned)], folder, 2, 2, namespaces)
    begun = time.monotonic()
    told = [one.communicate()[0] for one in whole]
    whole_seconds = time.monotonic() - begun
    if any(one.returncode for one in whole):
        raise SystemExit("\n".join(told))
    first, second = start(arguments, folder, 2, 2, namespaces)
    while len(list((folder / "under-way").glob("rank-*-of-4/posterior.json"))) < 4:
        time.sleep(0.05)
        if first.poll() is not None or second.poll() is not None:
            raise SystemExit(first.communicate()[0] + second.communicate()[0])
    kept = kept_batches(folder)
    # The whole node: torchrun and the processes that it started, which have sessions of their own.
    victims = [second.pid, *descendants(second.pid)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    died = time.monotonic()
    said = first.communicate(timeout=600)[0]
    ended = time.monotonic() - died
    lines = list(dict.fromkeys(line for line in said.splitlines() if line.startswith("mola:")))
    left = sorted(path.name for path in (folder / "under-way").glob("rank-*"))
    begun = time.monotonic()
    again = start(arguments, folder, 2, 2, namespaces)
    told = [one.communicate()[0] for one in again]
    if any(one.returncode for one in again):
        raise SystemExit("\n".join(told))
    resumed_seconds = time.monotonic() - begun
    sums = [
        {k: v for path in (folder / name).glob("factors*.safetensors") for k, v in load_file(path).items()}
        for name in ("whole", "interrupted")
    ]
    same = all(np.array_equal(sums[0][name], sums[1][name]) for name in sums[0]) and set(sums[0]) == set(sums[1])
    return {
        "processes_killed": len(victims),
        "seconds_until_the_other_node_ended": round(ended, 2),
        "its_exit_code": first.returncode,
        "its_lines": lines,
        "checkpoints_left": left,
        "batches_in_checkpoints": kept,
        "seconds_uninterrupted": round(whole_seconds, 1),
        "seconds_resumed": round(resumed_seconds, 1),
        "same_bits_after_resuming": bool(same and sums[0]),
    }


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    children = [int(one) for one in found.stdout.split()]
    return children + [other for child in children for other in descendants(child)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder to work in; otherwise a temporary one that is removed")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    environment = record.environment()
    prepare(folder)
    mola = [sys.executable, "-m", "mola"]
    train = [*mola, "train", "digits", "--networks", "2", "--epochs", "5", "--output", "digits", "--quiet"]
    subprocess.run(train, cwd=folder, check=True)
    refused = make_nodes()
    namespaces = refused is None
    print("nodes:", "two network namespaces" if namespaces else f"two loopback addresses ({refused})", flush=True)
    rows, alone = [], {}
    try:
        for layout, processes, nodes in (("1", 1, 1), ("2", 2, 1), ("4", 4, 1), ("2x2", 2, 2)):
            arguments = [str(Path(__file__).resolve()), "--work", layout]
            started = start(arguments, folder, processes, nodes, namespaces)
            told = [one.communicate()[0] for one in started]
            if any(one.returncode for one in started):
                raise SystemExit("\n".join(told))
            found = numbers_of(folder, layout)
            alone = alone or found
            seconds = json.loads((folder / f"seconds-{layout}.json").read_text())
            row = {"layout": layout, "numbers": sum(one.size for one in found.values())}
            rows.append(row | {"difference": largest_difference(alone, found), "seconds": seconds})
            print(rows[-1], flush=True)
        died = dying_node(folder, namespaces)
        print(json.dumps(died, indent=2))
    finally:
        if namespaces:
            remove_nodes()
        if options.keep is None:
            shutil.rmtree(folder)
    document = {
        "environment": environment,
        "nodes": "two network namespaces joined by veth" if namespaces else f"two loopback addresses, since {refused}",
        "bar": BAR,
        "rows": rows,
        "killed": died,
    }
    record.write("two_nodes", document)
    worst = max(value for row in rows for value in row["difference"].values())
    if worst > BAR or not died["same_bits_after_resuming"] or len(died["its_lines"]) != 1:
        message = (
            f"expected differences up to {BAR:g}, one line from the node that was left, and the same bits: see above."
        )
        raise SystemExit(message)


if __name__ == "__main__":
    main()
