"""Random calls against an independent closed form, and hostile calls.

    python benchmarks/fuzz.py [--calls 10000] [--seed 0] [--quick] [--case 1234]

Each call draws networks, data and options at random: structure, link, precision of the numbers, feature scales from 1e-30 to 1e25,
batch sizes from 1, forms of loaders, rules, weights. The result is compared with `tests/reference/closed_form.py`, numpy in float64
that shares no code with the library. One call in five is hostile: wrong shapes and types, NaN, values out of range, cut files.

A call fails if it is
  wrong     a result that differs from the closed form by more than rounding explains: the closed form is computed again with all
            numbers moved by a few roundings, and the result may be off by some times as much;
  foreign   an error that is no MolaError, or a warning that is no MolaWarning;
  refused   a valid call that was refused (at extreme feature scales a refusal counts as declined);
  accepted  a hostile call that was not refused;
  changed   a call that changed a network, the data or the posterior.

Exits with 1 if a call fails, and prints how to repeat it: `--case` runs one call, with its traceback. Writes results/fuzz.json.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

import mola
from mola.errors import MolaError, MolaWarning

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference import closed_form as dense

CALLS, QUICK, HOSTILE = 10_000, 150, 0.2
FAILURES = ("wrong", "foreign", "refused", "accepted", "changed")
STRUCTURES, LINKS = ("kron", "kron-exact", "kron-diag", "diag", "full"), tuple(dense.LINKS)
UNDECIDED = 0.02
"""Where rounding explains a relative difference of more than this, the closed form decides nothing."""
PAIRS, SLACK = 2, 30
"""Number of perturbed closed forms, up and down, and how many times as far as these a result may be off."""


class Failure(Exception):  # noqa: N818
    """A call that failed, and how."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def require(right: Any, message: str, outcome: str = "wrong") -> None:
    if not right:
        raise Failure(outcome, message)


# --- scenes -----------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Networks, data and options, all drawn from one seed."""

    rng: np.random.Generator
    networks: list[nn.Sequential]
    dtype: torch.dtype
    inputs: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    structure: str
    link: str
    precision: list[float]
    weights: Any
    extreme: bool
    """Values so large or so small that a refusal is an answer."""
    wild: bool
    """Values that differ so much in size that float64 itself may fail."""
    exact_features: bool
    labelled: bool
    notes: list[str] = field(default_factory=list)

    @property
    def rounding(self) -> dense.Rounding:
        own = torch.finfo(self.dtype).eps
        returned = torch.finfo(torch.promote_types(self.dtype, torch.float32)).eps
        return dense.Rounding(0.0 if self.exact_features else own, own, max(returned, dense.EPS))

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def features(self, inputs: Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Features with the constant 1, and logits, of every network."""
        pairs = []
        for network in self.networks:
            with torch.no_grad():
                phi, logits = network[:-1](inputs).double().numpy(), network(inputs).double().numpy()
            if network[-1].bias is not None:
                phi = np.concatenate([phi, np.ones((len(phi), 1))], axis=1)
            pairs.append((phi, logits))
        return [phi for phi, _ in pairs], [logits for _, logits in pairs]

    def reference(self, **changes: Any) -> dense.Mixture:
        """The closed form of the posterior."""
        labels = self.labels.numpy() if self.labelled else None
        components = []
        for network, precision, *seen in zip(
            self.networks, changes.get("precision", self.precision), *self.features(self.inputs), strict=True
        ):
            head = network[-1]
            columns = [head.weight] + ([] if head.bias is None else [head.bias[:, None]])
            weights = torch.cat(columns, 1).detach().double().numpy()
            components.append(dense.Component(self.structure, weights, *seen, labels, precision))
        return dense.Mixture(components, changes.get("weights", self.weights), changes.get("link", self.link))

    def loader(self, inputs: Tensor, labels: Tensor | None) -> Any:
        """The data in one of the forms that a loader may have."""
        size = int(self.pick([1, 2, 3, 7, len(inputs)]))
        batches = (
            list(inputs.split(size))
            if labels is None
            else list(zip(inputs.split(size), labels.split(size), strict=True))
        )
        self.notes.append(f"batches of {size}")
        if labels is not None and self.rng.random() < 0.3:
            return [{"input": x, "labels": y.int()} for x, y in batches]
        return iter(batches) if self.rng.random() < 0.3 else batches

    def fit(self, **changes: Any) -> mola.MoLA:
        options = {"structure": self.structure, "prior_precision": self.precision, "weights": self.weights}
        options |= {"link": self.link, "progress": False} | changes
        networks = self.networks if len(self.networks) > 1 or self.rng.random() < 0.5 else self.networks[0]
        return mola.fit(networks, self.loader(self.inputs, self.labels if self.labelled else None), **options)


KINDS = ("plain", "zero rows", "all zero", "tiny", "large", "huge", "constant", "duplicated", "mixed")
SHARES = np.array([10, 2, 1, 2, 2, 2, 1, 1, 1]) / 22


def draw(seed: int, *, plain: bool = False) -> Scene:
    rng = np.random.default_rng(seed)
    kind = "plain" if plain else str(rng.choice(KINDS, p=SHARES))
    count, classes, width = int(rng.integers(1, 5)), int(rng.integers(2, 13)), int(rng.integers(1, 21))
    size, fresh = int(rng.choice([1, 2, 5, 17, 40])), int(rng.choice([1, 2, 9]))
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    dtype = dtypes[int(rng.choice(4, p=[0.45, 0.45, 0.05, 0.05]))]
    half = dtype in dtypes[2:]
    if half and kind in ("tiny", "large", "huge", "mixed"):
        kind = "plain"
    scale = {"tiny": 1e-30, "large": 10.0 ** rng.integers(3, 9), "huge": 10.0 ** rng.integers(18, 26)}.get(kind, 1.0)
    body = "identity" if kind != "plain" or half else str(rng.choice(["identity", "tanh", "relu"]))
    x = rng.standard_normal((size + fresh, width)) * scale
    if kind == "zero rows":
        x[rng.random(len(x)) < 0.4] = 0
    elif kind == "all zero":
        x[: size if rng.random() < 0.5 else None] = 0
    elif kind == "constant":
        x[:, 0] = 3.0
    elif kind == "duplicated":
        x[:, width // 2 :] = x[:, : width - width // 2]
    elif kind == "mixed":
        x *= 10.0 ** rng.integers(-6, 7, size=width)
    inputs, bias, networks = torch.from_numpy(x).to(dtype), bool(rng.random() < 0.7), []
    for _ in range(count):
        inner = width if body == "identity" else int(rng.integers(1, 21))
        hidden = nn.Linear(width, inner, bias=body == "tanh", dtype=dtype)
        layers = {"identity": [nn.Identity()], "tanh": [hidden, nn.Tanh()], "relu": [hidden, nn.ReLU()]}[body]
        network = nn.Sequential(*layers, nn.Linear(inner, classes, bias=bias, dtype=dtype))
        strength = 10.0 ** rng.uniform(-1, 1) / inner**0.5
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) * strength))
            if scale != 1.0 and rng.random() < 0.7:  # logits of ordinary size
                network[-1].weight.div_(scale)
        networks.append(network.train(bool(rng.random() < 0.5)))
    precision = 10.0 ** rng.uniform(-8, 8, size=count)
    if rng.random() < 0.6:
        precision[:] = precision[0]
    labelled = bool(rng.random() < 0.85)
    weights: Any = rng.dirichlet(np.ones(count)) if rng.random() < 0.4 else "uniform"
    if labelled and rng.random() < 0.1:
        weights = "evidence"
    labels = torch.from_numpy(rng.integers(0, classes, size=size + fresh))
    structure, link = str(rng.choice(STRUCTURES)), str(rng.choice(LINKS))
    sizes = f"K={count} C={classes} P={width} N={size} n={fresh}"
    note = f"{kind} features {body}, {sizes} {dtype} {structure} {link} bias={bias} lambda={precision[0]:.2g}"
    return Scene(
        rng, networks, dtype, inputs[:size], labels[:size], inputs[size:], labels[size:], structure, link, precision.tolist(), weights,
        kind in ("huge", "tiny", "all zero", "zero rows"), kind in ("huge", "mixed"), body == "identity", labelled, [note],
    )  # fmt: skip


# --- comparison -------------------------------------------------------------------------------------------------------

Expected = Callable[[dense.Mixture], Any]


def tolerances(
    scene: Scene, expected: Expected, reference: dense.Mixture, arithmetic: float | None = None
) -> tuple[Any, Any] | None:
    """The closed form and how far rounding moves it; None where it does not converge or leaves float64."""
    rounding = scene.rounding
    if arithmetic is not None:
        rounding = dense.Rounding(rounding.features, rounding.logits, arithmetic)
    try:
        with np.errstate(all="ignore"):
            exact = np.asarray(expected(reference))
            moved = [expected(reference.shaken(noise, rounding)) for noise in dense.noises(scene.rng, PAIRS)]
            explained = np.max([np.abs(one - exact) for one in moved], axis=0)
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return None
    return (exact, explained) if np.isfinite(exact).all() else None


def compare(
    scene: Scene,
    what: str,
    found: Any,
    expected: Expected,
    reference: dense.Mixture,
    arithmetic: float | None = None,
    *,
    relative: bool = False,
) -> bool:
    """Whether the closed form decides anything; raises `Failure` where the result differs from it."""
    bounds = tolerances(scene, expected, reference, arithmetic)
    if bounds is None:
        return False
    (exact, explained), single = bounds, getattr(found, "dtype", None) == torch.float32
    values = np.asarray(found.detach().double() if isinstance(found, Tensor) else found, dtype=np.float64)
    require(values.shape == exact.shape, f"{what}: shape {values.shape}, expected {exact.shape}")
    if single:  # infinity is what float32 keeps of a number beyond its range
        values = np.where(np.isposinf(values) & (exact > 0.9 * torch.finfo(torch.float32).max), exact, values)
    require(np.isfinite(values).all(), f"{what}: not finite")
    least = 1e-295 if scene.rounding.arithmetic < 1e-10 else 1e-30
    size = np.maximum(np.abs(exact), least if relative else 1.0)
    if exact.ndim > 1:  # of a row: roundings of one class move the others
        explained = np.broadcast_to(explained.max(-1, keepdims=True), exact.shape)
        size = np.broadcast_to(size.max(-1, keepdims=True), exact.shape)
    tolerance = SLACK * explained + 64 * (scene.rounding.arithmetic if arithmetic is None else arithmetic) * size
    decided = np.isfinite(tolerance) & (tolerance <= UNDECIDED * size)
    off = np.abs(values - exact)
    if (decided & (off > tolerance)).any():
        place = np.unravel_index(np.argmax(np.where(decided, off / tolerance, 0)), off.shape)
        expected_value = f"the closed form is {exact[place]!r} +- {tolerance[place]:.1g}"
        raise Failure("wrong", f"{what}{list(map(int, place))}: {values[place]!r}, {expected_value}")
    return bool(decided.any())


def spread_decided(scene: Scene, reference: dense.Mixture, seen: Any) -> bool:
    """Whether rounding leaves the covariance of the logits nearly as it is; beside features of 1e22, a constant 1 is noise."""
    for component, *pair in zip(reference.components, *seen, strict=True):
        exact = component.moments(*pair).contrast
        size = np.abs(exact).max(axis=(1, 2), keepdims=True)
        for noise in dense.noises(scene.rng, PAIRS):
            if not (
                np.abs(component.shaken(noise, scene.rounding).moments(*pair).contrast - exact) <= 0.5 * size
            ).all():
                return False
    return True


def check_probs(scene: Scene, probs: Tensor, reference: dense.Mixture) -> bool:
    values, seen = probs.double().numpy(), scene.features(scene.test)
    valid = np.isfinite(values).all() and (values >= 0).all() and np.abs(values.sum(1) - 1).max() <= 1e-5
    require(valid, "rows are no probabilities")
    try:
        return compare(scene, "probs", probs, lambda one: one.probabilities(*seen), reference)
    except Failure:
        if scene.wild and not spread_decided(scene, reference, seen):
            return False
        raise


# --- valid calls: each returns whether the closed form decided ----------------------------------------------------------


def call_directly(scene: Scene) -> bool:
    inputs = scene.pick([scene.test, {"input": scene.test}, (scene.test,)])
    return check_probs(scene, scene.fit()(inputs), scene.reference())


def call_predict(scene: Scene) -> bool:
    posterior, reference, seen = scene.fit(), scene.reference(), scene.features(scene.test)
    if scene.rng.random() < 0.3:  # over a loader; rows of another batch size differ by roundings
        return check_probs(scene, posterior.predict(scene.loader(scene.test, None)).probs, reference)
    prediction = posterior.predict(scene.test)
    decided = check_probs(scene, prediction.probs, reference)
    compare(
        scene, "logit_variance", prediction.logit_variance, lambda one: one.variance(*seen), reference, relative=True
    )
    if all(one.gram.max() > 0 for one in reference.components):  # training features that are all 0 give no unit
        compare(
            scene, "ood_score", prediction.ood_score, lambda one: one.outlier_score(*seen), reference, relative=True
        )
    entropy = dense.entropy(prediction.probs.double().numpy())
    require(np.abs(prediction.entropy.double().numpy() - entropy).max() <= 1e-5, "entropy")
    require(torch.equal(prediction.label, prediction.probs.argmax(1)), "label")
    information = prediction.mutual_information
    require(((information >= 0) & (information <= prediction.entropy + 1e-6)).all(), "mutual_information")
    return decided


def call_evidence(scene: Scene) -> bool:
    scene.labelled = True
    found, exact = scene.fit().log_evidence(), scene.reference()
    # Hundreds of logarithms are added up, and may cancel.
    return compare(scene, "log_evidence", found, lambda one: one.log_evidence(), exact, 16 * dense.EPS, relative=True)


def call_with(scene: Scene) -> bool:
    """The same mixture at another prior precision, with other weights, with another link, in any order."""
    posterior, link = scene.fit(), scene.pick(LINKS)
    precision = (10.0 ** scene.rng.uniform(-8, 8, size=len(scene.networks))).tolist()
    weights = scene.rng.dirichlet(np.ones(len(scene.networks)))
    steps = [
        lambda one: one.with_link(link),
        lambda one: one.with_prior_precision(precision),
        lambda one: one.with_weights(weights),
    ]
    for step in scene.rng.permutation(3):
        posterior = steps[step](posterior)
    return check_probs(scene, posterior(scene.test), scene.reference(precision=precision, weights=weights, link=link))


def call_tune(scene: Scene) -> bool:
    """Candidates have the scores of the closed form, and the chosen candidate is the best of the curve."""
    name = scene.pick(["threshold", "nll", "brier"])
    inputs, labels = torch.cat([scene.test, scene.inputs]), torch.cat([scene.test_labels, scene.labels])
    grid = [float(value) for value in np.logspace(-4, 4, int(scene.rng.integers(1, 9)))]
    rule = mola.rules.Threshold(grid=grid) if name == "threshold" else mola.rules.Score(name, grid=grid)
    tuned = scene.fit().tune(scene.loader(inputs, labels), rule=rule, progress=False)
    scene.notes.append(f"rule {rule!r}")
    curve, chosen = {key: np.array(values) for key, values in tuned.tuning.curve.items()}, tuned.prior_precision[0]
    require(
        tuned.prior_precision == (chosen,) * len(scene.networks) and chosen in grid, f"chose {tuned.prior_precision}"
    )
    at, score = grid.index(chosen), "confidence" if name == "threshold" else name
    if name != "threshold":
        require(curve[name][at] == curve[name].min(), f"{name}: another candidate is better")
    if tuned.tuning.temperature != 1:  # underconfident networks: the curve is at this temperature, the closed form at 1
        return False
    seen = scene.features(inputs)

    def scores(one: dense.Mixture) -> np.ndarray:
        return np.array([one.at(value).scores(*seen, labels.numpy())[score] for value in grid])

    try:
        return compare(scene, score, curve[score], scores, scene.reference(), dense.EPS)
    except Failure:
        if scene.wild and not all(spread_decided(scene, scene.reference().at(value), seen) for value in grid):
            return False
        raise


def call_reweight(scene: Scene) -> bool:
    inputs, labels = torch.cat([scene.test, scene.inputs]), torch.cat([scene.test_labels, scene.labels])
    weights = scene.fit().reweight(scene.loader(inputs, labels), progress=False).weights.numpy()
    require((weights >= 0).all() and abs(weights.sum() - 1) <= 1e-9, f"weights {weights}")
    seen = scene.features(inputs)

    def gap(one: dense.Mixture) -> float:
        members = one.members(*seen)
        return dense.stacking_gap(members[:, np.arange(len(labels)), labels.numpy()].T, weights)

    bounds = tolerances(scene, gap, scene.reference(), dense.EPS)
    if bounds is None or not 1e-6 + SLACK * bounds[1] <= UNDECIDED:
        return False
    require(bounds[0] <= 1e-6 + SLACK * bounds[1], f"stacking: other weights may gain {bounds[0]:.3g} nats")
    return True


def call_files(scene: Scene) -> bool:
    posterior = scene.fit()
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "first")
        moved = (Path(folder) / "first").rename(Path(folder) / "second")
        loaded = mola.load(moved, scene.networks).predict(scene.test)
    before = posterior.predict(scene.test)
    for name in ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance"):
        require(torch.equal(getattr(before, name), getattr(loaded, name)), f"loaded: {name} differs")
    return check_probs(scene, loaded.probs, scene.reference())


def call_bound(scene: Scene) -> bool:
    scene.link = "probit"
    posterior = scene.fit()
    bound, probs = posterior.confidence_bound(scene.test), posterior(scene.test)
    above = probs.amax(1).double() > bound + 64 * scene.rounding.arithmetic
    require(not above.any(), f"a confidence is above its bound {float(bound.min())}")
    label = probs.argmax(1).numpy()

    def expected(one: dense.Mixture) -> np.ndarray:
        return np.einsum("k,kc->c", one.mixing, np.stack([part.bounds() for part in one.components]))[label]

    return compare(scene, "confidence_bound", bound, expected, scene.reference())


VALID = (call_directly, call_predict, call_evidence, call_with, call_tune, call_reweight, call_files, call_bound)
VALID_SHARES = np.array([22, 26, 7, 9, 14, 6, 8, 4]) / 96


# --- hostile calls ----------------------------------------------------------------------------------------------------

NAN = float("nan")
NO_NUMBERS = (0, -1.0, NAN, "one", None, [], {}, 1j, object(), b"1", [[1.0]], [None], torch.ones(2, 2))
NO_NAMES = (3, "", "krn", b"kron", [], ["kron"], {}, True, nn.Linear, object())
NO_WEIGHTS = ("uniformly", None, [], [2.0, -1.0], [NAN] * 2, {}, 7, object(), ["a"], 1j)
NO_LOADERS = (3, "data.npz", b"", True, [], (), {}, object(), [None], [3], ["x"], [[]], [{}], iter([]), [("x", "y")])
SOFTMAX = nn.Sequential(nn.Linear(3, 2), nn.Softmax(1))
NO_NETWORKS = (None, 3, "net.pt", [], {}, [None], nn.Linear, object(), nn.ReLU(), SOFTMAX)
NO_FOLDERS = ("/dev/null/here", None, 3, [], object())


def bad_inputs(s: Scene, _: Any) -> list[Any]:
    x = s.test
    odd = [torch.full_like(x, NAN), torch.full_like(x, float("inf")), torch.cat([x, x], 1), x.to(torch.complex64)]
    return [*odd, None, 3, "x", object(), b"", True, {"output": x}, {}, (x, x, x), ()]


def bad_batches(s: Scene, _: Any) -> list[Any]:
    x, y = s.inputs, s.labels
    odd = [y + 100, y - 300, y + 0.5, torch.cat([y, y]), "labels", object(), {"y": y}, torch.full((len(y),), NAN)]
    return [[(x, one)] for one in odd] + [[(torch.full_like(x, NAN), y)], [(torch.cat([x, x], 1), y)], [(x, y, y)]]


def damaged(s: Scene, p: mola.MoLA) -> Any:
    """Load a posterior of which a file is cut short, or gone."""
    with tempfile.TemporaryDirectory() as folder:
        victim = s.pick(sorted(p.save(folder).iterdir()))
        content = victim.read_bytes()
        victim.unlink()
        if s.rng.random() < 0.7:
            victim.write_bytes(content[: int(s.rng.integers(len(content)))])
        return mola.load(folder, s.networks)


def refit(s: Scene, **changes: Any) -> Any:
    given: dict[str, Any] = {"networks": s.networks, "train_loader": [(s.inputs, s.labels)], "progress": False}
    return mola.fit(**(given | changes))


def tune(s: Scene, p: mola.MoLA, rule: Any) -> Any:
    return p.tune([(s.inputs, s.labels)], rule=rule, progress=False)


ATTACKS: dict[str, tuple[Any, Callable[[Scene, mola.MoLA, Any], Any]]] = {
    "prior_precision": (NO_NUMBERS, lambda s, p, bad: refit(s, prior_precision=bad)),
    "with_prior_precision": (NO_NUMBERS, lambda s, p, bad: p.with_prior_precision(bad)),
    "temperature": (NO_NUMBERS, lambda s, p, bad: p.with_temperature(bad)),
    "pooling": ((*NO_NUMBERS[1:], 2), lambda s, p, bad: p.with_pooling(bad)),
    "exponent": (NO_NUMBERS[1:], lambda s, p, bad: p.with_distance_exponent(bad)),
    "weights": (NO_WEIGHTS, lambda s, p, bad: refit(s, weights=bad)),
    "with_weights": (NO_WEIGHTS, lambda s, p, bad: p.with_weights(bad)),
    "structure": (NO_NAMES, lambda s, p, bad: refit(s, structure=bad)),
    "link": (NO_NAMES, lambda s, p, bad: p.with_link(bad)),
    "head": (("", "krn", 3, True, ["0"] * 9, b"1", object()), lambda s, p, bad: refit(s, head=bad)),
    "train_loader": (NO_LOADERS, lambda s, p, bad: refit(s, train_loader=bad)),
    "val_loader": (NO_LOADERS, lambda s, p, bad: refit(s, val_loader=bad)),
    "networks": (NO_NETWORKS, lambda s, p, bad: refit(s, networks=bad)),
    "ensemble": (NO_NETWORKS[:8], lambda s, p, bad: mola.ensemble(bad)),
    "batches": (bad_batches, lambda s, p, bad: refit(s, train_loader=bad)),
    "validation batches": (bad_batches, lambda s, p, bad: p.tune(bad, progress=False)),
    "call": (bad_inputs, lambda s, p, bad: p(bad)),
    "predict": (bad_inputs, lambda s, p, bad: p.predict(bad)),
    "bound": (bad_inputs, lambda s, p, bad: p.with_link("probit").confidence_bound(bad)),
    "rule": ((*NO_NAMES, mola.rules.Threshold, "evidence"), lambda s, p, bad: tune(s, p, bad)),
    "grid": (([], [0.0], [NAN], "grid", 3, [None]), lambda s, p, bad: tune(s, p, mola.rules.Score(grid=bad))),
    "threshold": ((0, -1, 95, "high", NAN, [], 1j), lambda s, p, bad: mola.rules.Threshold(bad)),
    "outliers": (NO_LOADERS, lambda s, p, bad: tune(s, p, mola.rules.Outliers(bad))),
    "reweight": (NO_LOADERS, lambda s, p, bad: p.reweight(bad, progress=False)),
    "sample": (NO_NUMBERS, lambda s, p, bad: p.sample(bad)),
    "damaged files": ((None,), lambda s, p, bad: damaged(s, p)),
    "load": (NO_FOLDERS, lambda s, p, bad: mola.load(bad, s.networks)),
    "save": (NO_FOLDERS, lambda s, p, bad: p.save(bad)),
}


def attack(scene: Scene, name: str) -> None:
    """A call that must be refused, and must leave the posterior as it is."""
    posterior, (choices, call) = scene.fit(weights="uniform"), ATTACKS[name]
    before = posterior(scene.test)
    bad = scene.pick(choices(scene, posterior) if callable(choices) else choices)
    scene.notes.append(f"got {bad!r}"[:200])
    try:
        found = call(scene, posterior, bad)
    except MolaError:
        require(torch.equal(posterior(scene.test).nan_to_num(), before.nan_to_num()), "the posterior", "changed")
        return
    # `posterior(x)` is traced for export and checks no values: NaN in, NaN out.
    nan = name == "call" and isinstance(found, Tensor) and bool(found.isnan().all())
    require(nan, f"returned a {type(found).__name__}", "accepted")


# --- campaign ---------------------------------------------------------------------------------------------------------


def run(seed: int) -> tuple[str, str, str]:
    """One call: its kind, its outcome, and the message of a failure."""
    rng = np.random.default_rng([seed, 1])
    hostile = rng.random() < HOSTILE
    scene = draw(seed, plain=hostile)
    call = VALID[int(rng.choice(len(VALID), p=VALID_SHARES))]
    name = str(rng.choice(list(ATTACKS)))
    kind = f"hostile {name}" if hostile else call.__name__.removeprefix("call_")
    tensors = [
        *(one for network in scene.networks for one in network.parameters()),
        scene.inputs,
        scene.test,
        scene.labels,
    ]
    before, modes = [one.detach().clone() for one in tensors], [network.training for network in scene.networks]
    torch.manual_seed(seed)
    random = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", MolaWarning)
            if hostile:
                attack(scene, name)
            outcome = "refused rightly" if hostile else "right" if call(scene) else "unsettled"
        same = all(torch.equal(one.detach(), old) for one, old in zip(tensors, before, strict=True))
        require(same and modes == [network.training for network in scene.networks], "a network or the data", "changed")
        require(torch.equal(torch.get_rng_state(), random), "torch's random state", "changed")
    except Exception as error:
        refused = "declined" if scene.extreme else "refused"
        outcome = refused if isinstance(error, MolaError) else getattr(error, "outcome", "foreign")
        return kind, outcome, f"{type(error).__name__}: {error}; {'; '.join(scene.notes)}\n{traceback.format_exc()}"
    return kind, outcome, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--seed", type=int, default=0, help="of the first call; the others count on")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} calls; writes no file")
    parser.add_argument("--case", type=int, help="run one call, and show its traceback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        kind, outcome, words = run(options.case)
        print(f"case {options.case}: {kind}: {outcome}\n{words}")
        return int(outcome in FAILURES)
    calls, began = QUICK if options.quick else options.calls, time.monotonic()
    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in tqdm(range(options.seed, options.seed + calls), desc="fuzz", disable=None):
        kind, outcome, words = run(case)
        kinds["hostile" if kind.startswith("hostile") else kind][outcome] += 1
        if outcome in FAILURES:
            print(
                f"FAILED {kind}: {outcome}: {words.splitlines()[0]}\n  python benchmarks/fuzz.py --case {case}",
                flush=True,
            )
    total, seconds = sum(kinds.values(), collections.Counter()), round(time.monotonic() - began, 1)
    outcomes = {name: total[name] for name in (*FAILURES, "right", "unsettled", "declined", "refused rightly")}
    rows = [{"kind": kind, **counts} for kind, counts in sorted(kinds.items())]
    print(*rows, sep="\n")
    print(f"{calls} calls in {seconds:.0f} s: " + ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    if not options.quick:
        about = {"environment": record.environment(), "calls": calls, "seed": options.seed, "seconds": seconds}
        record.write("fuzz", about | {"outcomes": outcomes, "kinds": rows})
    return int(any(total[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
