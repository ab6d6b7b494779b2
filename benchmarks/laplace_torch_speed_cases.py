"""Time mola and laplace-torch at the same work and print the ratios as JSON. See `speed_against_laplace_torch.py`.

A tiny network before a last layer of P features and C outputs; one thread; turns of one after the other, of a tenth of a
second or of one call where that takes longer; CPU time, medians.
laplace-torch's backends: its default (curvlinops), BackPACK, and ASDL where it works. "Fastest" is the least of those that run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import record
import torch
from laplace import Laplace
from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mola

BACKENDS = {"curvlinops (default)": CurvlinopsGGN, "BackPACK": BackPackGGN, "ASDL": AsdlGGN}
PEER_NAME = {"kron": "kron", "full": "full", "diag": "diag"}
INPUTS = 784
FEW_INPUTS = 16
"""Of a network whose own pass is next to nothing: what is left is the method."""
GRID = 100
TURN_SECONDS = 0.1


def network(features: int, classes: int, inputs: int = INPUTS) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, features), nn.ReLU(), nn.Linear(features, classes)).eval()


class Batches:
    """Batches that are ready, with the data set that laplace-torch asks for: no time goes into putting rows together."""

    def __init__(
        self, count: int, classes: int, size: int = 256, judge: nn.Module | None = None, width: int = INPUTS
    ) -> None:
        inputs, labels = torch.randn(count, width), torch.randint(classes, (count,))
        if judge is not None:
            # As a network has them that is too sure of itself: the best prior precision then lies inside the grid.
            with torch.no_grad():
                labels = torch.distributions.Categorical(logits=0.3 * judge(inputs)).sample()
        self.dataset, self.batch_size = TensorDataset(inputs, labels), size
        self.batches = list(zip(inputs.split(size), labels.split(size), strict=True))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each, in turns. Short work is repeated within its turn: whatever ran before has filled the cache."""
    times: dict[str, list[float]] = {name: [] for name in works}
    calls: dict[str, int] = {}
    for name, work in works.items():
        first = cpu_seconds(work)
        calls[name] = max(1, round(TURN_SECONDS / max(first, 1e-4)))
        print(f"  {name}: {first:.2f} s the first time", file=sys.stderr, flush=True)
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(
                cpu_seconds(lambda work=work, name=name: [work() for _ in range(calls[name])]) / calls[name]
            )
    return times


def against(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median and quartiles of theirs over ours, turn by turn."""
    low, middle, high = np.quantile(np.array(theirs) / np.array(ours), [0.25, 0.5, 0.75])
    return {"ratio": float(middle), "quartile_1": float(low), "quartile_3": float(high)}


def bare(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """The network's own passes: whoever runs it cannot be faster."""
    with torch.inference_mode():
        for inputs in batches:
            model(inputs)


def peer(model: nn.Module, structure: str, backend: Any) -> Any:
    return Laplace(
        deepcopy(model),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure=PEER_NAME[structure],
        backend=backend,
    )


def working(model: nn.Module, structure: str, classes: int) -> dict[str, Any]:
    """The backends that can fit this at all; why the others cannot is told on stderr."""
    found, few = {}, Batches(64, classes, 64)
    for name, backend in BACKENDS.items():
        try:
            peer(model, structure, backend).fit(few)
            found[name] = backend
        except Exception as error:  # whatever a backend of another library trips over
            print(f"{structure} with {name}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
    return found


def fitting(features: int, classes: int, count: int, structures: tuple[str, ...], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for structure in structures:
        model = network(features, classes)
        loader = Batches(count, classes)
        works: dict[str, Callable[[], Any]] = {
            "mola": partial(mola.fit, model, loader, structure=structure, progress=False),
            "bare": partial(bare, model, [inputs for inputs, _ in loader]),
        }
        for name, backend in working(model, structure, classes).items():
            works[name] = lambda backend=backend, model=model, structure=structure, loader=loader: peer(
                model, structure, backend
            ).fit(loader)
        print(f"fit {structure}, P={features}, C={classes}", file=sys.stderr)
        times = interleaved(works, 2 if structure == "full" else repeats)
        rows += [
            {
                "work": f"fit {structure}",
                "features": features,
                "classes": classes,
                "data": count,
                "peer": name,
                "seconds": float(np.median(times["mola"])),
                "peer_seconds": float(np.median(found)),
                "bare_seconds": float(np.median(times["bare"])),
                **against(times["mola"], found),
            }
            for name, found in times.items()
            if name not in ("mola", "bare")
        ]
    return rows


def using(features: int, classes: int, count: int, repeats: int) -> list[dict[str, Any]]:
    """Prior tuning on a grid and by evidence, probit and Monte Carlo prediction."""
    model = network(features, classes)
    train, held_out = Batches(count, classes), Batches(count, classes, judge=model)
    inputs = next(iter(held_out))[0]
    ours = mola.fit(model, train, structure="kron-exact", progress=False)
    theirs = peer(model, "kron", CurvlinopsGGN)
    theirs.fit(train)
    ours(inputs)
    grid = torch.logspace(-4, 3, GRID)

    def their_grid() -> None:
        theirs.optimize_prior_precision(
            method="gridsearch",
            pred_type="glm",
            link_approx="probit",
            val_loader=held_out,
            log_prior_prec_min=-4,
            log_prior_prec_max=3,
            grid_size=GRID,
        )

    rule = mola.ValidationScore("nll")
    tried = len(ours.tune(held_out, rule, progress=False).tuning.curve["nll"])
    if tried != GRID:
        message = f"mola tried {tried} prior precisions, laplace-torch {GRID}: not the same work"
        raise RuntimeError(message)
    all_held_out = [some for some, _ in held_out]
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[Tensor], int]] = {
        f"tune, {len(grid)} values, whole call": (
            lambda: ours.tune(held_out, rule, progress=False),
            their_grid,
            all_held_out,
            max(2, repeats // 4),
        ),
        "tune, evidence": (
            lambda: ours.tune(rule=mola.Evidence(), progress=False),
            lambda: theirs.optimize_prior_precision(method="marglik", n_steps=100),
            [],
            repeats,
        ),
        f"predict, probit, {len(inputs)} inputs of {INPUTS} numbers": (
            lambda: ours(inputs),
            lambda: theirs(inputs, link_approx="probit"),
            [inputs],
            repeats,
        ),
        "predict, 100 samples": (
            lambda: ours.with_link(mola.MonteCarlo(samples=100))(inputs),
            lambda: theirs(inputs, link_approx="mc", n_samples=100),
            [inputs],
            repeats,
        ),
    }
    size = {"features": features, "classes": classes}
    return [
        size | {"data": sum(map(len, read))} | compared(work, mine, other, partial(bare, model, read), turns)
        for work, (mine, other, read, turns) in pairs.items()
    ]


def predicting(features: int, classes: int, count: int, width: int, repeats: int) -> dict[str, Any]:
    """Probit prediction for a large batch, behind a network of few inputs or many."""
    model, loader = network(features, classes, width), Batches(count, classes, count, width=width)
    inputs = next(iter(loader))[0]
    ours = mola.fit(model, loader, structure="kron-exact", progress=False)
    theirs = peer(model, "kron", CurvlinopsGGN)
    theirs.fit(loader)
    work = f"predict, probit, {count} inputs of {width} numbers"
    mine, other = lambda: ours(inputs), lambda: theirs(inputs, link_approx="probit")
    size = {"features": features, "classes": classes, "data": count}
    return size | compared(work, mine, other, partial(bare, model, [inputs]), repeats)


def compared(
    work: str, mine: Callable[[], Any], other: Callable[[], Any], passes: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    print(work, file=sys.stderr)
    times = interleaved({"mola": mine, "peer": other, "bare": passes}, repeats)
    return {
        "work": work,
        "peer": "curvlinops (default)",
        "seconds": float(np.median(times["mola"])),
        "peer_seconds": float(np.median(times["peer"])),
        "bare_seconds": float(np.median(times["bare"])),
        **against(times["mola"], times["peer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = fitting(256, 10, 2048, ("kron", "diag", "full"), repeats)
    rows += using(256, 10, 2048, repeats)
    rows += [predicting(256, 10, 1024, width, repeats) for width in (INPUTS, FEW_INPUTS)]
    rows += fitting(2048, 1000, 512, ("kron",), max(2, repeats // 4))
    json.dump({"rows": rows, "environment": record.environment("mola-torch", "laplace-torch")}, sys.stdout)


if __name__ == "__main__":
    main()
