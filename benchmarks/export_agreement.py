"""How far ONNX files are from PyTorch in onnxruntime: every structure, closed-form link, K = 1 and 5, float32 and float16.

    python benchmarks/export_agreement.py [--quick]

Five small convolutional networks with batch normalisation are trained on made-up images of five classes, and their posteriors
tuned by evidence, with unequal weights for K = 5. Each of the 64 cases is written by `mola.export_onnx` without its own check,
and the file is run by onnxruntime on batches of 1, 3, 17 and 64 images it was not traced with, some of them far from
the training data. Recorded is the largest difference to `posterior.predict` in each output; for labels, the number of
rows with another label, but for rows whose two best classes are closer than the tolerance.

float32 must agree to 1e-5. A float16 file holds the networks in half precision and is compared with the same posterior on
networks in half precision, to 1e-2: half precision has eleven binary digits, logits between 8 and 16 are 1/128 apart, and
onnxruntime rounds at other places than PyTorch. The script fails where a case misses its tolerance.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import record
import torch
from torch import Tensor, nn

import mola
from mola.export import OUTPUTS
from mola.export.tracing import in_half_precision

STRUCTURES = ("kron", "kron-exact", "diag", "full")
LINKS = ("probit", "probit-centered", "mean-field", "bridge")
TOLERANCES = {"float32": 1e-5, "float16": 1e-2}
CLASSES, SIDE = 5, 10
BATCHES = (1, 3, 17, 64)
NUMBERS = tuple(name for name in OUTPUTS if name != "label")


def images(count: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Noise with a pattern of its class, and the classes."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return scale * (patterns[labels] + noise), labels


def network(seed: int) -> nn.Module:
    """Convolution, batch normalisation and pooling, trained until it is right about most images."""
    torch.manual_seed(seed)
    convolution = (nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3))
    net = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(54, CLASSES))
    inputs, labels = images(500, seed=1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(40):
        for rows in torch.randperm(len(inputs)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    return net.eval()


def fitted(networks: list[nn.Module], structure: str) -> mola.MoLA:
    weights = torch.arange(1.0, len(networks) + 1)
    posterior = mola.fit(
        networks, [images(500, seed=1)], structure=structure, weights=(weights / weights.sum()).tolist(), progress=False
    )
    return posterior.tune(rule=mola.Evidence())


def compare(path: Path, posterior: mola.MoLA, precision: str) -> dict[str, Any]:
    """The largest difference in each output, over all batches."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    if names != list(OUTPUTS):
        sys.exit(f"{path.name} has outputs {names}, expected {list(OUTPUTS)}")
    reference = in_half_precision(posterior) if precision == "float16" else posterior
    worst: dict[str, Any] = dict.fromkeys(NUMBERS, 0.0) | {"labels": 0, "ties": 0, "rows": 0}
    for (seed, count), scale in itertools.product(enumerate(BATCHES), (1.0, 3.0)):
        inputs, _ = images(count, seed=100 + seed, scale=scale)
        found = dict(zip(names, session.run(names, {"input": inputs.numpy()}), strict=True))
        wanted = reference.predict(inputs.half() if precision == "float16" else inputs)
        for name in NUMBERS:
            value = (wanted.probs if name == "probabilities" else getattr(wanted, name)).double().numpy()
            if found[name].shape != value.shape or not np.isfinite(found[name]).all():
                sys.exit(f"{path.name}: {name} has shape {found[name].shape} or is not finite, expected {value.shape}")
            worst[name] = max(worst[name], float(np.abs(found[name] - value).max()))
        first, second = wanted.probs.double().topk(2).values.T.numpy()
        differ, tied = found["label"] != wanted.label.numpy(), first - second <= TOLERANCES[precision]
        worst["labels"] += int((differ & ~tied).sum())
        worst["ties"] += int((differ & tied).sum())
        worst["rows"] += count
    return worst


def measure(networks: list[nn.Module], structure: str, link: str, precision: str, folder: Path) -> dict[str, Any]:
    posterior = fitted(networks, structure).with_link(link)
    path = folder / "file.onnx"
    mola.export_onnx(posterior, path, images(2, seed=50)[0], float16=precision == "float16", check=False)
    row: dict[str, Any] = {"precision": precision, "networks": len(networks), "structure": structure, "link": link}
    row |= compare(path, posterior, precision)
    row["largest"] = max(row[name] for name in NUMBERS)
    row["agrees"] = row["largest"] <= TOLERANCES[precision] and row["labels"] == 0
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest difference over all cases of one precision, by output."""
    found: dict[str, Any] = {}
    for precision, tolerance in TOLERANCES.items():
        mine = [row for row in rows if row["precision"] == precision]
        if mine:
            found[precision] = {name: max(row[name] for row in mine) for name in (*NUMBERS, "largest")}
            found[precision] |= {name: sum(row[name] for row in mine) for name in ("labels", "ties", "rows")}
            found[precision] |= {
                "cases": len(mine),
                "tolerance": tolerance,
                "agree": sum(row["agrees"] for row in mine),
            }
    return found


def line(row: dict[str, Any]) -> str:
    numbers = " ".join(f"{row[name]:{max(len(name), 7)}.1e}" for name in NUMBERS)
    case = f"{row['precision']:9} {row['networks']} {row['structure']:10} {row['link']:15}"
    return f"{case} {numbers} {row['labels']:6} {'yes' if row['agrees'] else 'NO'}"


HEADER = f"{'precision':9} K {'structure':10} {'link':15} {' '.join(f'{name:>7}' for name in NUMBERS)} labels agrees"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one structure and link, K = 1; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    networks = [network(seed) for seed in range(1 if options.quick else 5)]
    inputs, labels = images(1000, seed=7)
    with torch.no_grad():
        accuracies = [float((net(inputs).argmax(-1) == labels).double().mean()) for net in networks]
    print(f"accuracies of the networks: {', '.join(f'{value:.3f}' for value in accuracies)}\n{HEADER}", flush=True)
    packages = record.environment("mola-torch", "onnx", "onnxscript", "onnxruntime")
    document = {"tolerances": TOLERANCES, "batches": BATCHES, "accuracies": accuracies, "environment": packages}
    counts, structures, links = ((1,), ("kron",), ("probit",)) if options.quick else ((1, 5), STRUCTURES, LINKS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for precision, count, structure, link in itertools.product(TOLERANCES, counts, structures, links):
            rows.append(measure(networks[:count], structure, link, precision, Path(folder)))
            print(line(rows[-1]), flush=True)
            if not options.quick:
                record.write("export_agreement", document | {"summary": summary(rows), "rows": rows})
    for precision, found in summary(rows).items():
        print(f"{precision}: {found['agree']} of {found['cases']} agree, largest difference {found['largest']:.1e}")
    return int(not all(row["agrees"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
