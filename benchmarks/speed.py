"""Measure the time that molaplace adds to the forward passes it needs.

    python benchmarks/speed.py [--quick] [--data DIR --networks DIR] [--only LeNet]
    python benchmarks/speed.py --peer [--venv DIR]

`fit` and `tune` (with every rule) are compared with bare forward passes over the same batches, and `posterior(x)` is compared
with `mola.ensemble`. The two sides of a comparison run alternately in one single-threaded process, and their CPU times are
measured. `ratio` is the tested call's time divided by the time of the other side (median over repetitions). `added` is
1 + (time outside the networks) / (time inside) in the tested call; for predictions, this value is divided by the ensemble's.
Limits apply to `added` rather than `ratio`, because the times of two passes through the same network may differ by more than the
overhead.

With --data and --networks (folders), ResNet-20 is measured with trained weights and CIFAR-10 images. Otherwise, the weights and
the images are random; the amount of arithmetic is the same. With --peer, molaplace is compared with laplace-torch on the same tasks,
in a separate environment (peer_environment.py).

The exit status is 1 if a limit is exceeded. Writes benchmarks/results/speed.json (--peer: speed_against_laplace_torch.json).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import peer_environment
import record
import torch
from torch import Tensor, nn

import molaplace as mola

Loader = list[tuple[Tensor, Tensor]]
Work = Callable[[], Any]

RULES = ("calibrated", "nll", "threshold", "brier", "ece", "distance", "outliers", "evidence")
TURN_SECONDS = 0.1
"""Minimum duration of a turn, in seconds. Work that takes less time is repeated within the turn, so that caches are warm."""


# --- time -------------------------------------------------------------------------------------------------------------


class Inside:
    """Context manager that measures the CPU seconds spent in the networks' forward passes."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        self.networks = networks
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self.handles = [network.register_forward_pre_hook(self._begin) for network in self.networks]
        self.handles += [network.register_forward_hook(self._end) for network in self.networks]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, *_: object) -> None:
        self.start = time.process_time()

    def _end(self, *_: object) -> None:
        self.seconds += time.process_time() - self.start


def cpu_seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def interleaved(works: dict[str, Work], repeats: int, networks: Sequence[nn.Module] = ()) -> dict[str, list[Any]]:
    """Run several turns of each task after a warm-up; return the CPU seconds of each turn, in total and inside the networks."""
    calls = {name: max(1, round(TURN_SECONDS / max(cpu_seconds(work), 1e-4))) for name, work in works.items()}
    times: dict[str, list[Any]] = {name: [] for name in works}
    for repeat in range(repeats):
        for name in list(works)[:: 1 if repeat % 2 else -1]:
            with Inside(networks) as inside:
                total = cpu_seconds(lambda name=name: [works[name]() for _ in range(calls[name])])
            times[name].append((total / calls[name], inside.seconds / calls[name]))
    return times


def compare(
    tested: Work, plain: Work, repeats: int, networks: Sequence[nn.Module], *, relative: bool
) -> dict[str, Any]:
    """Return `ratio`, `added` and the times; if `relative`, divide `added` by its value for `plain`."""
    times = interleaved({"tested": tested, "plain": plain}, repeats, networks)
    ratios = [times_tested[0] / other[0] for times_tested, other in zip(times["tested"], times["plain"], strict=True)]
    added = {
        name: statistics.median(total / passes for total, passes in measurements)
        for name, measurements in times.items()
    }
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "added": added["tested"] / (added["plain"] if relative else 1),
        "seconds": statistics.median(total for total, _ in times["tested"]),
        "plain_seconds": statistics.median(total for total, _ in times["plain"]),
        "repeats": repeats,
    }


def bare(networks: Iterable[nn.Module], loader: Loader) -> None:
    with torch.no_grad():
        for inputs, _ in loader:
            for network in networks:
                network(inputs)


# --- settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A network, its data, and a limit for each task: a ratio or, under the key "tune seconds", a number of seconds."""

    name: str
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    training: int
    validation: int
    batch: int
    repeats: int
    structures: tuple[str, ...] = ("kron",)
    rules: tuple[str, ...] = RULES
    bars: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def loader(self, count: int) -> Loader:
        """Draw random inputs and labels."""
        inputs = torch.randn(count, *self.shape)
        labels = torch.randint(self.classes, (count,))
        return list(zip(inputs.split(self.batch), labels.split(self.batch), strict=True))


def lenet() -> nn.Module:
    from molaplace_lab.models import lenet

    return lenet()


def resnet20() -> nn.Module:
    from molaplace_lab.models import resnet20

    return resnet20()


def head(inputs: int, features: int, classes: int) -> nn.Module:
    """Build a tiny network whose last layer has the given size."""
    return nn.Sequential(nn.Linear(inputs, features), nn.ReLU(), nn.Linear(features, classes))


RESNET = Setting(
    "ResNet-20 / CIFAR-10", resnet20, (3, 32, 32), 10, 2048, 1000, 128, 3, ("kron", "diag", "full"), RULES,
    {"fit": 1.05, "call": 1.05, "tune": 1.25},
)  # fmt: skip
SETTINGS = (
    RESNET,
    Setting(
        "LeNet / MNIST", lenet, (1, 28, 28), 10, 10_000, 2000, 128, 7, ("kron", "diag", "full"), RULES,
        {"fit": 1.3, "call": 1.3, "tune seconds": 1.0},
    ),
    Setting("head P=2048, C=1000", partial(head, 784, 2048, 1000), (784,), 1000, 2048, 1000, 256, 3, rules=("calibrated", "nll")),
    Setting(
        "head P=512, C=32,000", partial(head, 784, 512, 32_000), (784,), 32_000, 512, 128, 64, 3, ("kron-diag",), ("nll",)
    ),
    Setting(
        "mean-field, C=150", partial(head, 256, 256, 150), (256,), 150, 3000, 1000, 500, 1, rules=("nll",),
        bars={"tune seconds": 5.0}, options={"link": "mean-field"},
    ),
)  # fmt: skip


def real_resnet(data: Path, networks: Path) -> tuple[nn.Module, Loader, Loader]:
    from molaplace.images import normalisation
    from molaplace.saving.weights import load_weights
    from molaplace_lab.data.catalogue import load_images

    network = resnet20()
    load_weights(network, networks / "00.safetensors")
    normalise = normalisation("imagenet")
    loaders = []
    for name, count in (("train", RESNET.training), ("test", RESNET.validation)):
        images = load_images("cifar10", name, data).evenly(count)
        batches = zip(normalise(images.pixels).split(RESNET.batch), images.labels.split(RESNET.batch), strict=True)
        loaders.append(list(batches))
    # Use the memory layout in which this network is fastest.
    return network.eval().to(memory_format=torch.channels_last), loaders[0], loaders[1]


def measure(setting: Setting, quick: bool, prepared: tuple[nn.Module, Loader, Loader] | None) -> list[dict[str, Any]]:
    """Return one row for each task: fitting with each structure, predicting, and tuning with each rule."""
    share = 8 if quick else 1
    network, training, validation = prepared or (
        setting.network().eval(),
        setting.loader(max(setting.batch, setting.training // share)),
        setting.loader(max(setting.batch, setting.validation // share)),
    )
    repeats = 1 if quick else setting.repeats
    networks = [network]
    inputs = training[0][0]
    rows = []

    def add(work: str, kind: str, tested: Work, plain: Work, turns: int, *, relative: bool = False) -> None:
        row = compare(tested, plain, turns, networks, relative=relative)
        bar = setting.bars.get(work)
        limit = setting.bars.get(f"{work} seconds")
        missed = (bar is not None and row["added"] > bar) or (limit is not None and row["seconds"] > limit)
        rows.append(
            {"setting": setting.name, "work": work, "kind": kind, **row, "bar": bar, "limit": limit, "missed": missed}
        )

    for structure in setting.structures[:1] if quick else setting.structures:
        fit = partial(mola.fit, network, training, structure=structure, progress=False, **setting.options)
        add("fit", structure, fit, lambda: bare(networks, training), repeats)
        if structure == "full":  # no limit applies to the exact C P x C P Hessian
            rows[-1] |= {"bar": None, "missed": False}
    posterior = mola.fit(network, training, structure=setting.structures[0], progress=False, **setting.options)
    ensemble = mola.ensemble(network)
    turns = 2 * repeats + 1
    no_gradients = torch.no_grad()
    add(
        "call",
        "plain",
        no_gradients(lambda: posterior(inputs)),
        no_gradients(lambda: ensemble(inputs)),
        turns,
        relative=True,
    )
    scaled = posterior.tune(validation, rule="nll", progress=False).with_distance_exponent(1.5)
    add(
        "call",
        "by distance",
        no_gradients(lambda: scaled(inputs)),
        no_gradients(lambda: ensemble(inputs)),
        turns,
        relative=True,
    )
    outliers = [3 * images for images, _ in validation]
    for name in setting.rules[:2] if quick else setting.rules:
        if name == "evidence":
            seconds = statistics.median(
                cpu_seconds(lambda: posterior.tune(rule="evidence", progress=False)) for _ in range(repeats)
            )
            about = {"ratio": None, "added": None, "seconds": seconds, "bar": None, "limit": None, "missed": False}
            rows.append({"setting": setting.name, "work": "tune", "kind": name, **about})
            continue
        rule: Any = mola.rules.Outliers(outliers) if name == "outliers" else name
        passes = validation + [(images, images) for images in outliers] if name == "outliers" else validation
        tune = partial(posterior.tune, validation, rule=rule, progress=False)
        add("tune", name, tune, lambda passes=passes: bare(networks, passes), repeats)
    return rows


# --- dense outputs ----------------------------------------------------------------------------------------------------

DENSE_BARS = {"time": 1.3, "memory": 300e6}
SIZE = 256
DENSE_CLASSES = 21
FEATURES = 64
DENSE_BATCH = 4


class UNet(nn.Module):
    """A three-level U-Net with 64, 128 and 256 channels and a final 1x1 convolution on 64 features."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            first = nn.Conv2d(inputs, outputs, 3, padding=1)
            second = nn.Conv2d(outputs, outputs, 3, padding=1)
            return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

        self.down = nn.ModuleList([block(3, 64), block(64, 128), block(128, 256)])
        self.up = nn.ModuleList([block(256 + 128, 128), block(128 + 64, FEATURES)])
        self.head = nn.Conv2d(FEATURES, DENSE_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, of shape (n, C, H, W)."""
        maps: list[Tensor] = []
        for level in self.down:
            images = level(nn.functional.max_pool2d(images, 2) if maps else images)
            maps.append(images)
        for level, beside in zip(self.up, reversed(maps[:-1]), strict=True):
            images = level(torch.cat([nn.functional.interpolate(images, scale_factor=2.0), beside], dim=1))
        return self.head(images)


def dense_data(images: int, size: int) -> tuple[nn.Module, Loader]:
    torch.manual_seed(0)
    inputs = torch.randn(images, 3, size, size)
    labels = torch.randint(DENSE_CLASSES, (images, size, size))
    return UNet().eval(), list(zip(inputs.split(DENSE_BATCH), labels.split(DENSE_BATCH), strict=True))


def dense_memory(images: int, size: int) -> dict[str, int]:
    """Measure the peak resident memory of a bare pass and of `fit`. Call this function in a separate process."""
    from memory import peak_of

    network, loader = dense_data(images, size)
    # Run the code once first, so that the memory used to load it is not counted.
    mola.fit(nn.Conv2d(3, 4, 1), [(torch.randn(2, 3, 8, 8), torch.randint(4, (2, 8, 8)))], progress=False)
    plain = peak_of(lambda: bare([network], loader), above=0)
    return {"bare_peak": plain, "fit_peak": peak_of(lambda: mola.fit(network, loader, progress=False), above=0)}


def measure_dense(quick: bool) -> dict[str, Any]:
    images, size = (DENSE_BATCH, 64) if quick else (16, SIZE)
    network, loader = dense_data(images, size)
    fit = partial(mola.fit, network, loader, progress=False)
    row = compare(fit, lambda: bare([network], loader), 1 if quick else 3, [network], relative=False)
    command = [sys.executable, __file__, "--dense-memory", json.dumps([images, size])]
    row |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    row["over"] = row["fit_peak"] - row["bare_peak"]
    missed = row["added"] > DENSE_BARS["time"] or row["over"] > DENSE_BARS["memory"]
    name = f"U-Net, {images} images of {size} x {size}"
    return {
        "setting": name,
        "work": "fit",
        "kind": "dense",
        **row,
        "bar": DENSE_BARS["time"],
        "limit": None,
        "missed": missed,
    }


# --- laplace-torch ----------------------------------------------------------------------------------------------------

INPUTS = 784
GRID = 100


class PeerLoader(list):
    """Precomputed batches, with the attributes that laplace-torch reads."""

    def __init__(
        self, count: int, classes: int, judge: nn.Module | None = None, size: int = 256, width: int = INPUTS
    ) -> None:
        inputs = torch.randn(count, width)
        labels = torch.randint(classes, (count,))
        if judge is not None:
            # Draw labels for which the network is overconfident, so that the best prior precision lies inside the grid.
            with torch.no_grad():
                labels = torch.distributions.Categorical(logits=0.3 * judge(inputs)).sample()
        super().__init__(zip(inputs.split(size), labels.split(size), strict=True))
        self.dataset = torch.utils.data.TensorDataset(inputs, labels)
        self.batch_size = size


def peer_rows(quick: bool) -> list[dict[str, Any]]:
    """Time the same work with both libraries, inside laplace-torch's environment."""
    from laplace import Laplace
    from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN

    backends = {"curvlinops (default)": CurvlinopsGGN, "BackPACK": BackPackGGN, "ASDL": AsdlGGN}
    rows = []

    def peer(model: nn.Module, structure: str, backend: Any) -> Any:
        options = {"subset_of_weights": "last_layer", "hessian_structure": structure, "backend": backend}
        return Laplace(deepcopy(model), "classification", **options)

    def add(
        work: str, name: str, size: dict[str, int], tested: Work, work_of_peer: Work, passes: Work, repeats: int
    ) -> None:
        print(work, name, file=sys.stderr, flush=True)
        times = interleaved({"mola": tested, "peer": work_of_peer, "bare": passes}, 1 if quick else repeats)
        seconds = {key: statistics.median(total for total, _ in measurements) for key, measurements in times.items()}
        ratios = sorted(b[0] / a[0] for a, b in zip(times["mola"], times["peer"], strict=True))
        low, high = (ratios[0], ratios[-1]) if len(ratios) < 4 else statistics.quantiles(ratios, n=4)[::2]
        spread = {"ratio": statistics.median(ratios), "quartile_1": low, "quartile_3": high}
        medians = {"seconds": seconds["mola"], "peer_seconds": seconds["peer"], "bare_seconds": seconds["bare"]}
        rows.append({"work": work, **size, "peer": name, **medians, **spread})

    def fitting(features: int, classes: int, count: int, structures: Sequence[str], repeats: int) -> None:
        model = head(INPUTS, features, classes).eval()
        loader = PeerLoader(count, classes)
        size = {"features": features, "classes": classes, "data": count}
        for structure in structures:
            for name, backend in backends.items():
                try:
                    peer(model, structure, backend).fit(PeerLoader(64, classes))
                except Exception as error:  # another library's backends may raise any error
                    print(f"{structure} with {name}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
                    continue
                fit_peer = lambda backend=backend, structure=structure: peer(model, structure, backend).fit(loader)  # noqa: E731
                fit_ours = partial(mola.fit, model, loader, structure=structure, progress=False)
                add(f"fit {structure}", name, size, fit_ours, fit_peer, partial(bare, [model], loader), repeats)

    def using(features: int, classes: int, count: int, repeats: int) -> None:
        model = head(INPUTS, features, classes).eval()
        training = PeerLoader(count, classes)
        held_out = PeerLoader(count, classes, model)
        posterior = mola.fit(model, training, structure="kron-exact", progress=False)
        fitted_peer = peer(model, "kron", CurvlinopsGGN)
        fitted_peer.fit(training)
        size = {"features": features, "classes": classes, "data": count}
        grid = torch.logspace(-4, 3, GRID).tolist()
        search = {"pred_type": "glm", "link_approx": "probit", "val_loader": held_out, "grid_size": GRID}
        search |= {"log_prior_prec_min": -4, "log_prior_prec_max": 3}
        pairs: dict[str, tuple[Work, Work, Loader, int]] = {
            f"tune, {GRID} values, whole call": (
                lambda: posterior.tune(held_out, rule=mola.rules.Score("nll", grid=grid), progress=False),
                lambda: fitted_peer.optimize_prior_precision(method="gridsearch", **search),
                held_out,
                max(2, repeats // 4),
            ),
            "tune, evidence": (
                lambda: posterior.tune(rule="evidence", progress=False),
                lambda: fitted_peer.optimize_prior_precision(method="marglik", n_steps=100),
                [],
                repeats,
            ),
        }
        for inputs in (held_out[0][0], PeerLoader(1024, classes, size=1024)[0][0]):
            pairs[f"predict, probit, {len(inputs)} inputs of {INPUTS} numbers"] = (
                torch.no_grad()(lambda inputs=inputs: posterior(inputs)),
                lambda inputs=inputs: fitted_peer(inputs, link_approx="probit"),
                [(inputs, inputs)],
                repeats,
            )
        for work, (mine, other, loader, turns) in list(pairs.items())[1 if quick else 0 :]:
            add(work, "curvlinops (default)", size, mine, other, partial(bare, [model], loader), turns)

    fitting(256, 10, 256 if quick else 2048, ("kron",) if quick else ("kron", "diag", "full"), 9)
    using(256, 10, 256 if quick else 2048, 9)
    if not quick:
        fitting(2048, 1000, 512, ("kron",), 2)
    return rows


def against_laplace_torch(venv: Path, quick: bool) -> None:
    python = peer_environment.prepare(venv)
    result = peer_environment.run(python, "speed.py", "--inside", *(["--quick"] if quick else []))
    for row in result["rows"]:
        print(
            f"{row['work']:44} P={row['features']:<5} {row['peer']:22} molaplace {1e3 * row['seconds']:8.1f} ms   laplace-torch "
            f"{1e3 * row['peer_seconds']:8.0f} ms   {row['ratio']:7.1f} times"
        )
    if not quick:
        record.write("speed_against_laplace_torch", result)


# --- main -------------------------------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:7.3f} {row['added']:7.3f}"
    bar = f"at most {row['bar']:g}" if row["bar"] else f"at most {row['limit']:g} s" if row["limit"] else ""
    over = f" {row['over'] / 1e6:.0f} MB more" if "over" in row else ""
    verdict = ("  MISSED" if row["missed"] else "  met") if bar else ""
    return (
        f"{row['setting']:32} {row['work']:5} {row['kind']:12} {ratio:15} {row['seconds']:8.3f} s{over}  {bar}{verdict}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use an eighth of the data and fewer repetitions; write no file and apply no limits",
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets, for ResNet-20")
    parser.add_argument("--networks", type=Path, help="folder with the weights of a ResNet-20 (00.safetensors)")
    parser.add_argument(
        "--only",
        default="",
        help="run only settings whose names contain this text; rows recorded for other settings are kept",
    )
    parser.add_argument("--peer", action="store_true", help="compare with laplace-torch")
    parser.add_argument(
        "--venv", type=Path, default=peer_environment.cache_folder(), help="folder of laplace-torch's environment"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dense-memory", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", mola.errors.MolaWarning)  # warnings are expected, because the labels are random
    if options.inside:
        print(json.dumps({"rows": peer_rows(options.quick), "environment": record.environment("laplace-torch")}))
        return 0
    if options.dense_memory is not None:
        print(json.dumps(dense_memory(*options.dense_memory)))
        return 0
    if options.peer:
        against_laplace_torch(options.venv, options.quick)
        return 0
    if (options.data is None) != (options.networks is None):
        parser.error("--data (images) and --networks (weights of ResNet-20) must be passed together")
    environment = record.environment("molaplace")
    rows = []
    print(f"{'':32} {'work':5} {'kind':12} {'ratio':>7} {'added':>7} {'tested':>10}")
    for setting in SETTINGS:
        if options.only in setting.name:
            real = setting is RESNET and options.networks is not None
            for row in measure(setting, options.quick, real_resnet(options.data, options.networks) if real else None):
                rows.append(row)
                print(line(row), flush=True)
    if options.only in "U-Net":
        rows.append(measure_dense(options.quick))
        print(line(rows[-1]), flush=True)
    if not options.quick:
        measured = {row["setting"] for row in rows}
        others = record.read("speed")["rows"] if options.only and record.exists("speed") else []
        others = [row for row in others if row["setting"] not in measured]
        about = {"environment": environment, "trained": options.networks is not None}
        record.write("speed", about | {"rows": others + rows})
    return int(not options.quick and any(row["missed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
