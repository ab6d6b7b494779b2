"""What the Bayesian head adds to an exported ensemble in onnxruntime, as ratios in one run.

    python benchmarks/export_overhead.py [--quick] [--weights FOLDER] [--seconds 20]

K networks are written as ONNX twice: as plain as can be (the mean of the softmaxes, probabilities alone, by torch.onnx
itself), and as a posterior of `mola.export_onnx` with all of its outputs; also without the epistemic part, which is
measured on 64 draws and costs the most, and as a plain ensemble with mola's outputs. Sessions run one thread and take turns
of a few hundredths of a second, in both orders, on the same batch; the figure is the median over turns of the ratio of the
process's CPU time to the plain file's in the same round, with quartiles. The bar is 1.03, for ResNet-20 with K = 5 and all
outputs. The script fails where that misses it. Time does not depend on the weights, so without --weights they are random.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import record
import torch
from torch import Tensor, nn

import mola
from mola.export import OUTPUTS
from mola.lab.models import build_network
from mola.saving.weights_files import load_weights

BAR = 1.03
TURN_SECONDS = 0.03
NETWORKS = {"resnet-20": (3, 32, 32), "lenet": (1, 28, 28)}
STRUCTURES = ("kron", "kron-exact", "diag", "full")


class Plain(nn.Module):
    """The deep ensemble as one would write it by hand."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, inputs: Tensor) -> Tensor:
        """Probabilities."""
        return torch.stack([network(inputs).softmax(-1) for network in self.networks]).mean(0)


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def files(networks: list[nn.Module], shape: tuple[int, ...], structure: str, folder: Path) -> dict[str, Any]:
    """Sessions by what they hold; "plain" first."""
    inputs, labels = torch.randn(256, *shape), torch.randint(10, (256,))
    posterior = mola.fit(networks, [(inputs, labels)], structure=structure, progress=False)
    few = inputs[:4]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shapes = ({0: torch.export.Dim("batch")},)
        plain = torch.onnx.export(Plain(networks).eval(), (few,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    plain.save(folder / "plain.onnx", external_data=False)
    without = [name for name in OUTPUTS if name != "mutual_information"]
    mola.export_onnx(mola.ensemble(networks), folder / "ensemble.onnx", few, check=False)
    mola.export_onnx(posterior, folder / "without.onnx", few, outputs=without, check=False)
    written = mola.export_onnx(posterior, folder / "posterior.onnx", few)
    found = {name: session(folder / f"{name}.onnx") for name in ("plain", "ensemble", "without", "posterior")}
    return found | {"written": written}


def turns(sessions: dict[str, Any], inputs: np.ndarray, seconds: float) -> tuple[dict[str, np.ndarray], float]:
    """CPU seconds of each session in each round, and how long a run of the plain one takes."""
    feeds = {name: {one.get_inputs()[0].name: inputs} for name, one in sessions.items()}
    for name, one in sessions.items():
        one.run(None, feeds[name])
    start = time.process_time()
    sessions["plain"].run(None, feeds["plain"])
    single = time.process_time() - start
    count = max(1, round(TURN_SECONDS / single))
    names, times = list(sessions), {name: [] for name in sessions}
    spent = 0.0
    while spent < seconds or len(times["plain"]) < 10:
        names.reverse()
        for name in names:
            start = time.process_time()
            for _ in range(count):
                sessions[name].run(None, feeds[name])
            times[name].append((time.process_time() - start) / count)
            spent += times[name][-1] * count
    return {name: np.array(values) for name, values in times.items()}, float(np.median(times["plain"]))


def measure(networks: list[nn.Module], name: str, structure: str, batches: tuple[int, ...], seconds: float):
    shape = NETWORKS[name]
    with tempfile.TemporaryDirectory() as folder:
        sessions = files(networks, shape, structure, Path(folder))
        written = sessions.pop("written")
        for batch in batches:
            inputs = np.random.default_rng(0).standard_normal((batch, *shape)).astype(np.float32)
            times, single = turns(sessions, inputs, seconds)
            row = {"network": name, "networks": len(networks), "structure": structure, "batch": batch}
            row |= {"plain_ms": 1e3 * single, "rounds": len(times["plain"]), "megabytes": written.bytes / 1e6}
            row["largest_difference"] = max(written.differences.values())
            for kind in ("ensemble", "without", "posterior"):
                ratios = times[kind] / times["plain"]
                low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
                fastest = float(times[kind].min() / times["plain"].min())
                row[kind] = {"median": middle, "quartile_1": low, "quartile_3": high, "of_fastest": fastest}
            yield row


def line(row: dict[str, Any]) -> str:
    def ratio(kind: str) -> str:
        values = row[kind]
        return f"{values['median']:6.3f} [{values['quartile_1']:.3f}, {values['quartile_3']:.3f}]"

    return (
        f"{row['network']:10} {row['networks']:2} {row['structure']:11} {row['batch']:5} {row['plain_ms']:9.2f} | "
        f"{ratio('posterior')} | {ratio('without')} | {ratio('ensemble')} | {row['largest_difference']:.1e}"
    )


HEADER = (
    f"{'network':10}  K {'structure':11} batch  plain ms | {'posterior, all outputs':22} | {'without epistemic part':22} | "
    f"{'plain ensemble by mola':22} | differs by"
)


def load(name: str, count: int, folder: Path | None) -> list[nn.Module]:
    networks = [build_network(name).eval() for _ in range(count)]
    if folder is not None:
        paths = sorted(folder.glob("*.safetensors"))[:count]
        if len(paths) < count:
            sys.exit(f"{folder} holds {len(paths)} networks, expected {count}")
        for network, path in zip(networks, paths, strict=True):
            load_weights(network, path)
    return networks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one structure, one batch size, few rounds; writes no file"
    )
    parser.add_argument("--weights", type=Path, help="folder with trained ResNet-20 as .safetensors")
    parser.add_argument("--seconds", type=float, default=20, help="CPU time for each row (default 20)")
    parser.add_argument("--structures", nargs="+", default=STRUCTURES, choices=STRUCTURES)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(HEADER, flush=True)
    packages = record.environment("mola-torch", "onnx", "onnxscript", "onnxruntime")
    document = {"bar": BAR, "threads": 1, "trained": options.weights is not None, "environment": packages}
    structures, seconds = (("kron",), 3.0) if options.quick else (options.structures, options.seconds)
    measured = []
    for name in NETWORKS:
        networks = load(name, 5, options.weights if name == "resnet-20" else None)
        for structure in structures:
            for row in measure(networks, name, structure, (1,) if options.quick else (1, 16, 128), seconds):
                measured.append(row)
                print(line(row), flush=True)
                if not options.quick:
                    record.write("export_overhead", document | {"rows": measured})
    missed = [row for row in measured if row["network"] == "resnet-20" and row["posterior"]["median"] > BAR]
    for row in missed:
        print(f"above {BAR}: {row['network']}, {row['structure']}, batch {row['batch']}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
