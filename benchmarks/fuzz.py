"""Check the results of random calls against an independent implementation of the closed form.

    python benchmarks/fuzz.py [--calls 10000] [--seed 0] [--quick] [--case 1234]

For each call, networks, data and options are drawn at random. The results are compared with those of
`tests/reference/closed_form.py`, which uses NumPy in float64 and shares no code with the library.

A call that fails has one of these outcomes:
  wrong     A result differs from the closed form by more than rounding can explain. To measure the effect of rounding, the
            closed form is recomputed with all numbers perturbed by about the size of their rounding errors. The result may
            be off by at most a small multiple of the change.
  foreign   The call raised an error that is not a MolaError, or a warning that is not a MolaWarning.
  refused   The call raised a MolaError.
  changed   The call changed a network, the data or the posterior.

If a call fails, the command to reproduce it is printed and the exit status is 1. `--case` runs a single call and, if it fails,
shows the traceback. Writes results/fuzz.json.
"""

from __future__ import annotations

import argparse
import collections
import sys
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

import molaplace as mola
from molaplace.errors import MolaError, MolaWarning

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference import closed_form as dense

CALLS = 10_000
QUICK = 150
FAILURES = ("wrong", "foreign", "refused", "changed")
STRUCTURES = ("kron", "kron-exact", "kron-diag", "diag", "full")
LINKS = tuple(dense.LINKS)
UNDECIDED = 0.02
"""Relative rounding error above which a comparison is inconclusive."""
PAIRS = 4
SLACK = 30
"""Number of pairs of perturbations (one up, one down), and the largest allowed ratio of an error to the change that they cause."""


class WrongError(Exception):
    """Error raised when a result differs from the closed form."""


def require(right: Any, message: str) -> None:
    if not right:
        raise WrongError(message)


# --- problems ---------------------------------------------------------------------------------------------------------

SCALES = {"plain": 1.0, "zero rows": 1.0, "all zero": 1.0, "duplicated": 1.0, "tiny": 1e-30, "large": 1e6, "huge": 1e22}


@dataclass
class Problem:
    """Networks, data and options, all drawn at random from one seed."""

    rng: np.random.Generator
    networks: list[nn.Sequential]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    structure: str
    link: str
    precision: list[float]
    weights: Any
    notes: list[str] = field(default_factory=list)

    @property
    def arithmetic(self) -> float:
        return torch.finfo(torch.promote_types(self.test[0].dtype, torch.float32)).eps

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def features(self, inputs: Tensor) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return each network's features (with a constant 1 appended if the head has a bias) and its logits."""
        rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for network in self.networks:
            with torch.no_grad():
                phi = network[:-1](inputs).double().numpy()
                logits = network(inputs).double().numpy()
            bias = np.ones((len(phi), 0 if network[-1].bias is None else 1))
            rows[0].append(np.concatenate([phi, bias], axis=1))
            rows[1].append(logits)
        return rows

    def reference(self, **changes: Any) -> dense.Mixture:
        """Return the same posterior from the independent implementation, with any changes applied."""
        components = []
        precisions = changes.get("precision", self.precision)
        for network, precision, *rows in zip(self.networks, precisions, *self.features(self.train[0]), strict=True):
            head = network[-1]
            columns = [head.weight] if head.bias is None else [head.weight, head.bias[:, None]]
            weights = torch.cat(columns, 1).detach().double().numpy()
            components.append(dense.Component(self.structure, weights, *rows, self.train[1].numpy(), precision))
        return dense.Mixture(components, changes.get("weights", self.weights), changes.get("link", self.link))

    def loader(self, inputs: Tensor, labels: Tensor) -> Any:
        """Return the data as a loader, in a randomly chosen form that the library accepts."""
        size = int(self.pick([1, 2, 3, 7, len(inputs)]))
        self.notes.append(f"batches of {size}")
        batches = list(zip(inputs.split(size), labels.split(size), strict=True))
        return self.pick([batches, iter(batches), [{"input": x, "labels": y.int()} for x, y in batches]])

    def fit(self, **changes: Any) -> mola.MoLA:
        options = {"structure": self.structure, "prior_precision": self.precision, "weights": self.weights}
        return mola.fit(self.networks, self.loader(*self.train), link=self.link, progress=False, **(options | changes))


def draw(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    kind = "plain" if rng.random() < 0.5 else str(rng.choice(list(SCALES)))
    count = int(rng.integers(1, 5))
    classes = int(rng.integers(2, 13))
    width = int(rng.integers(1, 21))
    size = int(rng.choice([1, 2, 5, 17, 40]))
    fresh = int(rng.choice([1, 2, 9]))
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    dtype = dtypes[int(rng.choice(3, p=[0.45, 0.45, 0.1]) if SCALES[kind] == 1 else rng.integers(2))]
    x = rng.standard_normal((size + fresh, width)) * SCALES[kind]
    if kind == "zero rows":
        x[rng.random(len(x)) < 0.4] = 0
    elif kind == "all zero":
        x[: size if rng.random() < 0.5 else None] = 0
    elif kind == "duplicated":
        x[:, width // 2 :] = x[:, : width - width // 2]
    inputs = torch.from_numpy(x).to(dtype)
    labels = torch.from_numpy(rng.integers(0, classes, size=size + fresh))
    bias = bool(rng.random() < 0.7) and kind != "huge"  # the constant 1 is negligible next to features of about 1e22
    deep = kind == "plain" and dtype is not torch.bfloat16 and bool(rng.random() < 0.6)
    networks = []
    for _ in range(count):
        inner = int(rng.integers(1, 21)) if deep else width
        body = [nn.Linear(width, inner, dtype=dtype), nn.Tanh()] if deep else [nn.Identity()]
        network = nn.Sequential(*body, nn.Linear(inner, classes, bias=bias, dtype=dtype))
        strength = 10.0 ** rng.uniform(-1, 1) / inner**0.5
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) * strength))
            network[-1].weight.div_(SCALES[kind])  # keep the logits in a typical range
        networks.append(network.train(bool(rng.random() < 0.5)))
    precision = 10.0 ** rng.uniform(-8, 8, size=count)
    weights: Any = [rng.dirichlet(np.ones(count)), "uniform", "evidence"][int(rng.choice(3, p=[0.4, 0.5, 0.1]))]
    structure = str(rng.choice(STRUCTURES))
    link = str(rng.choice(LINKS))
    note = f"{kind} features, K={count} C={classes} P={width} N={size} n={fresh} {dtype} {structure} {link} bias={bias}"
    train = (inputs[:size], labels[:size])
    test = (inputs[size:], labels[size:])
    return Problem(rng, networks, train, test, structure, link, precision.tolist(), weights, [note])


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(
    problem: Problem,
    name: str,
    predicted: Any,
    expected: Callable[[dense.Mixture], Any],
    reference: dense.Mixture,
    arithmetic: float | None = None,
    *,
    relative: bool = False,
) -> bool:
    """Compare a result with the closed form; return False if the closed form fails to converge, overflows or is ill-conditioned.

    Raises:
        WrongError: the result differs from the closed form by more than rounding can explain.
    """
    arithmetic = problem.arithmetic if arithmetic is None else arithmetic
    epsilon = torch.finfo(problem.test[0].dtype).eps
    exact_features = isinstance(problem.networks[0][0], nn.Identity)
    rounding = dense.Rounding(0.0 if exact_features else epsilon, epsilon, arithmetic)
    try:
        with np.errstate(all="ignore"):
            exact = np.asarray(expected(reference))
            perturbed = [expected(reference.shaken(noise, rounding)) for noise in dense.noises(problem.rng, PAIRS)]
            movement = np.max([np.abs(other - exact) for other in perturbed], axis=0)
    except (dense.NoAnswerError, np.linalg.LinAlgError):
        return False
    if not np.isfinite(exact).all():
        return False
    values = np.asarray(predicted.detach().double() if isinstance(predicted, Tensor) else predicted, dtype=np.float64)
    require(values.shape == exact.shape, f"{name}: shape {values.shape}, expected {exact.shape}")
    require(not np.isnan(values).any(), f"{name}: NaN")
    if getattr(predicted, "dtype", None) == torch.float32:  # beyond the range of float32, infinity is correct
        values = np.where(np.isposinf(values) & (exact > 3e38), exact, values)
    size = np.maximum(np.abs(exact), (1e-295 if arithmetic < 1e-10 else 1e-30) if relative else 1.0)
    if exact.ndim > 1:  # rounding errors in one class affect all others
        movement = np.broadcast_to(movement.max(-1, keepdims=True), exact.shape)
        size = np.broadcast_to(size.max(-1, keepdims=True), exact.shape)
    tolerance = SLACK * movement + 64 * arithmetic * size
    decided = np.isfinite(tolerance) & (tolerance <= UNDECIDED * size)
    off = np.abs(values - exact)
    if (decided & (off > tolerance)).any():
        index = np.unravel_index(np.argmax(np.where(decided, off / tolerance, 0)), off.shape)
        closed = f"the closed form is {exact[index]!r} +- {tolerance[index]:.1g}"
        raise WrongError(f"{name}{list(map(int, index))}: {values[index]!r}, {closed}")
    return bool(decided.any())


def check_probs(problem: Problem, probs: Tensor, reference: dense.Mixture) -> bool:
    values = probs.detach().double().numpy()
    rows = problem.features(problem.test[0])
    valid = np.isfinite(values).all() and (values >= 0).all() and np.abs(values.sum(1) - 1).max() <= 1e-5
    require(valid, "rows are not probabilities")
    return compare(problem, "probs", probs, lambda mixture: mixture.probabilities(*rows), reference)


# --- calls: each returns True if the comparison was conclusive ------------------------------------------------------


def call_predict(problem: Problem) -> bool:
    posterior = problem.fit()
    reference = problem.reference()
    x = problem.test[0]
    if problem.rng.random() < 0.4:
        return check_probs(problem, posterior(problem.pick([x, {"input": x}, (x,)])), reference)
    prediction = posterior.predict(x)
    rows = problem.features(x)
    decided = check_probs(problem, prediction.probs, reference)
    variance = prediction.logit_variance.transpose(0, 1)
    score = prediction.ood_score
    compare(problem, "logit_variance", variance, lambda mixture: mixture.variance(*rows), reference, relative=True)
    # The score is undefined if all training features are 0.
    if all(component.gram.max() > 0 for component in reference.components):
        compare(problem, "ood_score", score, lambda mixture: mixture.outlier_score(*rows), reference, relative=True)
    return decided


def call_evidence(problem: Problem) -> bool:
    evidence = problem.fit().log_evidence()
    exact = problem.reference()
    # The evidence is a sum of hundreds of logarithms, which may cancel each other out.
    return compare(
        problem, "log_evidence", evidence, lambda mixture: mixture.log_evidence(), exact, 16 * dense.EPS, relative=True
    )


def call_with(problem: Problem) -> bool:
    """Compare the mixture with the closed form after changing its prior precision, weights and link in random order."""
    posterior = problem.fit()
    link = problem.pick(LINKS)
    precision = (10.0 ** problem.rng.uniform(-8, 8, size=len(problem.networks))).tolist()
    weights = problem.rng.dirichlet(np.ones(len(problem.networks)))
    steps: tuple[Callable[[mola.MoLA], mola.MoLA], ...] = (
        lambda posterior: posterior.with_link(link),
        lambda posterior: posterior.with_prior_precision(precision),
        lambda posterior: posterior.with_weights(weights),
    )
    for step in problem.rng.permutation(3):
        posterior = steps[step](posterior)
    reference = problem.reference(precision=precision, weights=weights, link=link)
    return check_probs(problem, posterior(problem.test[0]), reference)


def call_tune(problem: Problem) -> bool:
    """Check that the candidates' scores agree with the closed form, and that the chosen candidate has the best score."""
    name = problem.pick(["threshold", "nll", "brier"])
    inputs, labels = (torch.cat(parts) for parts in zip(problem.test, problem.train, strict=True))
    grid = [float(value) for value in np.logspace(-4, 4, int(problem.rng.integers(1, 9)))]
    rule = mola.rules.Threshold(grid=grid) if name == "threshold" else mola.rules.Score(name, grid=grid)
    tuned = problem.fit().tune(problem.loader(inputs, labels), rule=rule, progress=False)
    chosen = tuned.prior_precision[0]
    score = "confidence" if name == "threshold" else name
    require(set(tuned.prior_precision) == {chosen} and chosen in grid, f"chose {tuned.prior_precision}")
    curve = np.array(tuned.tuning.curve[score])
    if name != "threshold":
        require(curve[grid.index(chosen)] == curve.min(), f"{name}: another candidate is better")
    if tuned.temperature != 1:  # the closed form always uses a temperature of 1
        return False
    rows = problem.features(inputs)

    def scores(mixture: dense.Mixture) -> np.ndarray:
        return np.array([mixture.at(value).scores(*rows, labels.numpy())[score] for value in grid])

    return compare(problem, score, curve, scores, problem.reference(), dense.EPS)


CALLED = {call_predict: 60, call_evidence: 10, call_with: 10, call_tune: 20}


# --- campaign ---------------------------------------------------------------------------------------------------------


def run(seed: int) -> tuple[str, str]:
    """Run one call; return its outcome and a description, which includes the traceback if the call failed."""
    problem = draw(seed)
    shares = np.array(list(CALLED.values()))
    call = list(CALLED)[int(problem.rng.choice(len(shares), p=shares / shares.sum()))]
    problem.notes.append(call.__name__)
    tensors = [tensor for network in problem.networks for tensor in network.parameters()] + [
        *problem.train,
        *problem.test,
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    modes = [network.training for network in problem.networks]
    torch.manual_seed(seed)
    random = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", MolaWarning)
            outcome = "right" if call(problem) else "unsettled"
    except Exception as error:
        outcome = "wrong" if isinstance(error, WrongError) else "refused" if isinstance(error, MolaError) else "foreign"
        return outcome, f"{type(error).__name__}: {error}; {'; '.join(problem.notes)}\n{traceback.format_exc()}"
    same = all(torch.equal(tensor.detach(), old) for tensor, old in zip(tensors, before, strict=True))
    same = same and modes == [network.training for network in problem.networks]
    same = same and torch.equal(torch.get_rng_state(), random)
    return outcome if same else "changed", "; ".join(problem.notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first call; each later call uses the next integer"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} calls; write no file")
    parser.add_argument("--case", type=int, help="run one call and show its traceback")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        outcome, message = run(options.case)
        print(f"case {options.case}: {outcome}\n{message}")
        return int(outcome in FAILURES)
    calls = QUICK if options.quick else options.calls
    began = time.monotonic()
    total = collections.Counter[str]()
    for case in tqdm(range(options.seed, options.seed + calls), desc="fuzz", disable=None):
        outcome, message = run(case)
        total[outcome] += 1
        if outcome in FAILURES:
            print(f"FAILED: {outcome}: {message.splitlines()[0]}")
            print(f"  python benchmarks/fuzz.py --case {case}", flush=True)
    outcomes = {name: total[name] for name in (*FAILURES, "right", "unsettled")}
    seconds = round(time.monotonic() - began, 1)
    print(f"{calls} calls in {seconds:.0f} s: " + ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    if not options.quick:
        about = {"environment": record.environment(), "calls": calls, "seed": options.seed, "seconds": seconds}
        record.write("fuzz", about | {"outcomes": outcomes})
    return int(any(total[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
