"""Check that molaplace agrees in float64 with laplace-torch, MAPIE and TorchCP on all quantities that they define in the same way.

    python benchmarks/peers.py [laplace | conformal] [--venv DIR]

laplace-torch runs in one environment, and MAPIE and TorchCP in another (peer_environment.py). In both, molaplace runs in the same
process as the libraries that it is compared with.

For `full` and `diag`, laplace-torch defines the same posterior as molaplace. For a head without a bias, laplace-torch's `kron`
equals molaplace's `kron-exact`. With a bias, the two differ, because laplace-torch puts the bias in a separate block. The Laplace
bridges of the two libraries agree for all structures except `diag`, for which conditioning the logits on a sum of 0
(laplace-torch) differs from projecting them (molaplace). The comparison uses laplace-torch's BackPACK backend. The default backend,
curvlinops, is reported separately, because it computes the `full` Hessian in float32 even for float64 networks.

Prediction sets from MAPIE (lac, and randomised aps with the same random numbers) and TorchCP (lac, aps, raps, and
class-conditional lac) must contain the same classes as molaplace's. Up to one set in a hundred may differ, because MAPIE adds
classes whose scores exceed the threshold by no more than a rounding error. The other forms of aps, which MAPIE defines
differently, are reported but not tested.

The exit status is 1 if a difference exceeds its tolerance. Writes compare_laplace_torch.json,
compare_laplace_torch_regression.json and conformal_against_mapie.json to benchmarks/results. With `--frozen`, the script
instead prints the small reference case for tests/library.
"""

import argparse
import json
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peer_environment
import record
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import molaplace as mola
from molaplace.component import Component

TOLERANCE = 1e-8
"""Relative tolerance. At a prior precision of 1e-3, condition numbers of 1e6 leave about 10 correct digits in float64."""
SETTLED = 1e-6
"""Largest allowed slope of the evidence at its maximum. The search for the maximum stops when the evidence no longer grows in
float64."""
PRIOR_PRECISIONS = (1e-3, 1e-1, 1.0, 30.0, 1e3)
PEER_NAME = {"full": "full", "diag": "diag", "kron-exact": "kron"}
NOISE = 0.3
STEP = 2e-3


# --- laplace-torch ----------------------------------------------------------------------------------------------------


def mlp(outputs: int, bias: bool) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs, bias=bias))


def lenet_with(outputs: int, bias: bool) -> nn.Sequential:
    from molaplace_lab.models import lenet

    network = lenet()
    network[-1] = nn.Linear(84, outputs, bias=bias)
    return network


def observed(inputs: Tensor, outputs: int) -> Tensor:
    """Return targets of shape (n, D): sines of the first value of each input, plus noise."""
    waves = torch.sin(inputs.flatten(1)[:, :1] + torch.arange(outputs, dtype=torch.float64))
    return waves + NOISE * torch.randn(len(inputs), outputs, dtype=torch.float64)


def train(network: nn.Module, data: TensorDataset) -> None:
    """Train for a few steps, so that the outputs are as large as those of a trained network."""
    inputs, labels = data.tensors
    loss = nn.functional.mse_loss if labels.is_floating_point() else nn.functional.cross_entropy
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(50 if labels.is_floating_point() else 20):
        optimizer.zero_grad()
        loss(network(inputs), labels).backward()
        optimizer.step()
    network.eval().zero_grad()


def apart(tensor: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference, divided by the largest absolute value."""
    return float(f"{float((tensor.detach() - reference.detach()).abs().max() / reference.detach().abs().max()):.2g}")


def bias_last(head: nn.Linear) -> Tensor:
    """Return the position of each of molaplace's weights in laplace-torch's parameter vector (weights row by row, then biases)."""
    classes, features = head.weight.shape
    positions = torch.arange(classes * features).view(classes, features)
    if head.bias is not None:
        positions = torch.cat([positions, classes * features + torch.arange(classes)[:, None]], dim=1)
    return positions.flatten()


def weight_covariance(peer: Any) -> Tensor:
    precision = peer.posterior_precision
    if isinstance(precision, Tensor):
        return precision.inverse() if precision.dim() == 2 else torch.diag(1 / precision)
    return precision.to_matrix().inverse()


def quantities(
    posterior: mola.MoLA, peer: Any, inputs: Tensor, targets: Tensor, order: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each quantity's name, molaplace's value and laplace-torch's value."""
    (component,) = posterior.components
    (precision,) = posterior.prior_precision
    curvature = component.layer.curvature
    outputs, features = component.layer.weights.shape
    blocks = weight_covariance(peer)[order][:, order].view(outputs, features, outputs, features)
    with torch.no_grad():
        phi = posterior.networks[0][:-1](inputs)
        phi = torch.cat([phi, torch.ones(len(phi), features - phi.shape[1], dtype=phi.dtype)], 1)
    mean, covariance = peer._glm_predictive_distribution(inputs)
    regression = targets.is_floating_point()
    by = "output" if regression else "class"
    yield (
        f"weight covariance by {by}",
        torch.stack([curvature.class_covariance(precision, c) for c in range(outputs)]),
        torch.stack([blocks[c, :, c] for c in range(outputs)]),
    )
    yield (
        "functional covariance" if regression else "logit covariance",
        curvature.covariance(curvature.project(phi), precision),
        covariance,
    )
    yield "log marginal likelihood", posterior.log_evidence()[0], peer.log_marginal_likelihood()
    prediction = posterior.predict(inputs)
    if not regression:
        yield "logit mean", prediction.logit_mean[:, 0], mean
        links = mola.links
        for link, link_of_peer in (
            (links.Probit(), "probit"),
            (links.Bridge(), "bridge"),
            (links.Bridge(True), "bridge_norm"),
        ):
            yield (
                f"probabilities, {link_of_peer}",
                posterior.with_link(link)(inputs),
                peer(inputs, link_approx=link_of_peer),
            )
        return
    functional = covariance.diagonal(dim1=1, dim2=2)
    variance = functional + peer.sigma_noise.square()
    density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(targets).sum(1)
    yield "mean", prediction.mean, mean
    yield "functional variance", prediction.epistemic, functional
    yield "predictive variance", prediction.variance, variance
    yield "log density of targets", prediction.log_prob(targets), density


def evidence_slopes(posterior: mola.MoLA, peer: Any, regression: bool) -> Iterator[tuple[str, float, float]]:
    """Measure the slopes of laplace-torch's evidence at the optimum that molaplace's evidence rule finds.

    Yields a name, the optimal prior precision, and the slope with respect to the log prior precision or the log noise. The
    slopes are fourth-order finite differences, because laplace-torch's `kron` determinant cannot be differentiated automatically
    with respect to the noise.
    """
    if regression:
        free = [
            Component(network, component.head, component.layer, replace(component.likelihood, estimated=True))
            for network, component in zip(posterior.networks, posterior.components, strict=True)
        ]
        posterior = posterior.with_parts(components=free)
    best = posterior.tune(rule="evidence", progress=False)
    point = [best.prior_precision[0], *([float(best.noise[0, 0])] if regression else [])]

    def evidence(along: int, by: float) -> float:
        shifted = [value * math.exp(by * (index == along)) for index, value in enumerate(point)]
        return float(peer.log_marginal_likelihood(*(torch.tensor([value], dtype=torch.float64) for value in shifted)))

    sizes = [peer.n_params / 2] + ([peer.n_data * peer.n_outputs] if regression else [])
    for along, (name, size) in enumerate(zip(("prior precision", "noise"), sizes, strict=False)):
        near, far = (evidence(along, by * STEP) - evidence(along, -by * STEP) for by in (1, 2))
        yield f"slope in {name}", point[0], float(f"{abs((8 * near - far) / (12 * STEP)) / size:.2g}")


def compare(
    name: str, network: nn.Sequential, structure: str, data: TensorDataset, unseen: tuple[Tensor, Tensor], backend: Any
) -> list[dict[str, Any]]:
    """Return the differences between the libraries for every quantity and prior precision."""
    from laplace import Laplace

    regression = data.tensors[1].is_floating_point()
    loader = DataLoader(data, batch_size=100)
    likelihood: Any = mola.likelihoods.Gaussian(noise=NOISE, shared=True) if regression else "categorical"
    posterior = mola.fit(network, loader, structure=structure, likelihood=likelihood, progress=False)
    options: dict[str, Any] = {
        "subset_of_weights": "last_layer",
        "hessian_structure": PEER_NAME[structure],
        "backend": backend,
    }
    if regression:
        options["sigma_noise"] = NOISE
    peer = Laplace(deepcopy(network), "regression" if regression else "classification", **options)
    peer.fit(loader)
    rows: dict[str, list[float]] = {}
    for precision in PRIOR_PRECISIONS:
        peer.prior_precision = precision
        at = posterior.with_prior_precision(precision)
        for quantity, value, reference in quantities(at, peer, *unseen, bias_last(network[-1])):
            rows.setdefault(quantity, []).append(apart(value, reference))
    common = {"network": name, "structure": structure}
    comparisons = [
        common | {"quantity": quantity, "prior_precision": PRIOR_PRECISIONS, "difference": differences}
        for quantity, differences in rows.items()
    ]
    slopes = evidence_slopes(posterior, peer, regression)
    comparisons += [
        common | {"quantity": what, "prior_precision": (at,), "difference": [slope], "tolerance": SETTLED}
        for what, at, slope in slopes
    ]
    return comparisons


def laplace_torch() -> dict[str, Any]:
    """Compare molaplace with laplace-torch, inside laplace-torch's environment."""
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    torch.manual_seed(0)
    torch.set_num_threads(1)  # for small matrices, threads would only wait for each other
    documents = {}
    cases: dict[str, list[tuple[str, Callable[[int, bool], nn.Sequential], tuple[int, ...], int]]] = {
        "compare_laplace_torch": [("MLP 8-16-5", mlp, (8,), 5), ("LeNet 84-10", lenet_with, (1, 28, 28), 10)],
        "compare_laplace_torch_regression": [
            ("MLP 8-16-1", mlp, (8,), 1),
            ("MLP 8-16-3", mlp, (8,), 3),
            ("LeNet 84-3", lenet_with, (1, 28, 28), 3),
        ],
    }
    for record_name, listed in cases.items():
        same = []
        different = []
        for name, make, shape, outputs in listed:
            inputs, others = (torch.randn(count, *shape, dtype=torch.float64) for count in (300, 50))
            if "regression" in record_name:
                labels = observed(inputs, outputs)
                unseen = (others, observed(others, outputs))
            else:
                labels = torch.randint(5, (300,))
                unseen = (others, torch.zeros(50, dtype=torch.long))
            for bias in (True, False):
                network = make(outputs, bias).double()
                data = TensorDataset(inputs, labels)
                train(network, data)
                both = partial(compare, f"{name}{'' if bias else ' no bias'}", network, data=data, unseen=unseen)
                for structure in ("full", "diag") if bias else PEER_NAME:
                    for row in both(structure=structure, backend=BackPackGGN):
                        projected = structure != "diag" or "bridge" not in row["quantity"]
                        (same if projected else different).append(row)
                if bias:
                    different += both(structure="kron-exact", backend=BackPackGGN)
                if bias and make is mlp:
                    rounded = both(structure="full", backend=CurvlinopsGGN)
                    different += [row | {"structure": "full, float32"} for row in rounded]
        packages = record.environment("laplace-torch", "backpack-for-pytorch", "curvlinops-for-pytorch")
        documents[record_name] = {"tolerance": TOLERANCE, "environment": packages, "same": same, "different": different}
    return documents


def above(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows in which both libraries define the quantity alike but their values differ by more than the tolerance."""
    return [
        row for row in document["same"] if not max(row["difference"]) <= row.get("tolerance", document["tolerance"])
    ]


def judge_laplace_torch(documents: dict[str, Any]) -> int:
    failed = 0
    for name, document in documents.items():
        wrong = above(document)
        failed += len(wrong)
        largest = max(max(row["difference"]) for row in document["same"] if "tolerance" not in row)
        right = len(document["same"]) - len(wrong)
        print(
            f"{name}: {right} of {len(document['same'])} rows are within their tolerance; the largest difference is {largest:.1e}"
        )
        for row in wrong:
            print(f"  ABOVE {row['network']}, {row['structure']}, {row['quantity']}: {row['difference']}")
        record.write(name, document)
    return failed


# --- MAPIE and TorchCP ------------------------------------------------------------------------------------------------

SEED = 0
ALLOWED = 0.01
"""Fraction of prediction sets that may differ between libraries because some scores equal the threshold up to rounding."""


def torchcp() -> types.SimpleNamespace:
    """Import TorchCP's scores and predictors without the parts that need graph libraries and sorting extensions."""
    package = types.ModuleType("torchcp")
    package.__path__ = [str(distribution("torchcp").locate_file("torchcp"))]
    sorting = types.ModuleType("torchsort")
    sorting.soft_rank = sorting.soft_sort = None  # type: ignore[attr-defined]
    sys.modules.update(torchcp=package, torchsort=sorting)
    from torchcp.classification.predictor import ClassConditionalPredictor, SplitPredictor
    from torchcp.classification.score import APS, LAC, RAPS

    return types.SimpleNamespace(LAC=LAC, APS=APS, RAPS=RAPS, split=SplitPredictor, by_class=ClassConditionalPredictor)


def torchcp_sets(score: Any, predictor: Any, probs: Any, labels: Any, new: Any, coverage: float) -> np.ndarray:
    made = predictor(score, alpha=1 - coverage)
    made.calculate_threshold(torch.from_numpy(probs), torch.from_numpy(labels))
    return made.predict_with_logits(torch.from_numpy(new)).bool().numpy()


def torchcp_scores(peer: Any, penalty: float, free: int) -> dict[str, Any]:
    return {
        "lac": peer.LAC(score_type="identity"),
        "aps": peer.APS(score_type="identity", randomized=False),
        "raps": peer.RAPS(score_type="identity", randomized=False, penalty=penalty, kreg=free),
    }


def mapie_sets(kind: str, probs: Any, labels: Any, new: Any, coverage: float, **options: Any) -> np.ndarray:
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):
        """A classifier that returns its inputs as probabilities."""

        classes_ = np.arange(probs.shape[1])
        n_features_in_ = probs.shape[1]

        def predict_proba(self, x: Any) -> np.ndarray:
            return np.asarray(x)

        def predict(self, x: Any) -> np.ndarray:
            return np.asarray(x).argmax(1)

    made = SplitConformalClassifier(Given(), coverage, kind, prefit=True, random_state=SEED)
    made.conformalize(probs, labels)
    return made.predict_set(new, conformity_score_params=options)[1][:, :, 0]


def predictions(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw labels and overconfident probabilities for them."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (count, classes))
    true = np.exp(logits / 1.5)
    labels = np.array([draw.choice(classes, p=row / row.sum()) for row in true])
    probs = np.exp(logits - logits.max(1, keepdims=True))
    return probs / probs.sum(1, keepdims=True), labels


def randomised(probs: Any, labels: Any, new: Any, coverage: float) -> np.ndarray:
    """Compute molaplace's randomised sets, using one minus MAPIE's random numbers.

    molaplace adds, and MAPIE subtracts, a random fraction of the last class's probability. MAPIE uses the same seed for calibration
    and prediction.
    """

    def drawn(*shape: int, **_: Any) -> Tensor:
        return torch.from_numpy(1 - np.random.RandomState(SEED).uniform(size=shape[0])).reshape(shape)

    with mock.patch("torch.rand", drawn):
        return mola.prediction_sets(probs, labels, coverage, "aps", randomised=True)(new).numpy()


class Ends:
    """Low, high and middle quantiles, from the columns of an (n, 3) array, in the form that `mola.prediction_intervals` expects."""

    def __init__(self, columns: np.ndarray) -> None:
        self.columns = torch.from_numpy(columns)
        self.mean = self.columns[:, 2:]
        self.variance = torch.ones(len(columns), 1)

    def interval(self, _level: float) -> tuple[Tensor, Tensor]:
        """Return the low and high quantiles; ignore the level."""
        return self.columns[:, :1], self.columns[:, 1:2]


def intervals() -> dict[str, Any]:
    """Compare molaplace with MAPIE on conformalised quantile regression with a symmetric correction."""
    from mapie.regression import ConformalizedQuantileRegressor
    from sklearn.base import BaseEstimator, RegressorMixin

    class Column(RegressorMixin, BaseEstimator):
        """A regressor whose prediction is one column of its inputs."""

        def __init__(self, column: int = 0) -> None:
            self.column = column
            self.fitted_ = True

        def fit(self, _x: Any, _y: Any) -> Any:
            return self

        def predict(self, x: Any) -> np.ndarray:
            return np.asarray(x)[:, self.column]

    def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        x = rng.uniform(0, 3, count)
        middle = np.sin(2 * x)
        return np.stack([middle - 0.4, middle + 0.5, middle], 1), middle + rng.normal(0, 0.1 + 0.3 * x)

    columns, targets = draw(500, 0)
    new, truth = draw(2000, 1)
    made = ConformalizedQuantileRegressor([Column(0), Column(1), Column(2)], 0.9, prefit=True)
    made.conformalize(columns, targets)
    peer_intervals = made.predict_interval(new, symmetric_correction=True)[1][:, :, 0]
    our_intervals = torch.cat(mola.prediction_intervals(Ends(columns), targets, 0.9)(Ends(new)), 1).numpy()  # type: ignore[arg-type]
    coverage = [
        float(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean()) for ends in (our_intervals, peer_intervals)
    ]
    difference = float(np.abs(our_intervals - peer_intervals).max())
    return {
        "peer": "MAPIE",
        "case": "conformalised quantiles",
        "promised": 0.9,
        "difference": difference,
        "coverage": coverage,
    }


def conformal() -> dict[str, Any]:
    """Compare molaplace with MAPIE and TorchCP, inside their environment."""
    peer = torchcp()
    same: list[dict[str, Any]] = []
    different: list[dict[str, Any]] = []
    for classes, count in ((3, 200), (10, 1000), (100, 3000)):
        probs, labels = predictions(count, classes, classes)
        new, truth = predictions(2000, classes, 1000 + classes)
        for coverage in (0.8, 0.9, 0.95):
            arguments = probs, labels, new, coverage

            def add(
                rows: list[Any],
                name: str,
                case: str,
                sets: Any,
                peer_sets: Any,
                truth: Any = truth,
                coverage: float = coverage,
            ) -> None:
                rows_of_sets = np.arange(len(truth))
                rows.append(
                    {
                        "peer": name,
                        "case": case,
                        "classes": sets.shape[1],
                        "promised": coverage,
                        "sets": len(truth),
                        "equal": int((sets == peer_sets).all(1).sum()),
                        "coverage": [float(held[rows_of_sets, truth].mean()) for held in (sets, peer_sets)],
                        "size": [float(held.sum(1).mean()) for held in (sets, peer_sets)],
                    }
                )

            options: dict[str, dict[str, Any]] = {"lac": {}, "aps": {}, "raps": {"penalty": 0.02, "free": 2}}
            our_sets = {
                name: mola.prediction_sets(probs, labels, coverage, name, **more)(new).numpy()  # type: ignore[arg-type]
                for name, more in options.items()
            }
            add(same, "MAPIE", "lac", our_sets["lac"], mapie_sets("lac", *arguments))
            add(
                same,
                "MAPIE",
                "aps, randomised",
                randomised(*arguments),
                mapie_sets("aps", *arguments, include_last_label="randomized"),
            )
            scores = torchcp_scores(peer, 0.02, 2)
            for name, score in scores.items():
                add(same, "TorchCP", name, our_sets[name], torchcp_sets(score, peer.split, *arguments))
            if classes <= 10:
                by_class = mola.prediction_sets(probs, labels, coverage, by="class")(new).numpy()
                add(same, "TorchCP", "lac, by class", by_class, torchcp_sets(scores["lac"], peer.by_class, *arguments))
            for case, last in (("aps, last label kept", True), ("aps, last label dropped", False)):
                add(different, "MAPIE", case, our_sets["aps"], mapie_sets("aps", *arguments, include_last_label=last))
    packages = {name: version(name) for name in ("mapie", "torchcp", "torch", "numpy", "scikit-learn")}
    share = sum(row["equal"] for row in same) / sum(row["sets"] for row in same)
    return {
        "packages": packages,
        "same": same,
        "different": different,
        "intervals": [intervals()],
        "equal_share": share,
    }


def frozen() -> dict[str, Any]:
    """Return the contents of tests/library/conformal_reference.json: a small case, and MAPIE's and TorchCP's sets for it."""
    peer = torchcp()
    probs, labels = predictions(60, 4, 1)
    new, _ = predictions(25, 4, 2)
    arguments = probs, labels, new, 0.8
    scores = torchcp_scores(peer, 0.05, 1)
    sets_by_method = {f"TorchCP {name}": torchcp_sets(score, peer.split, *arguments) for name, score in scores.items()}
    sets_by_method["TorchCP lac by class"] = torchcp_sets(scores["lac"], peer.by_class, *arguments)
    sets_by_method["MAPIE lac"] = mapie_sets("lac", *arguments)
    sets_by_method["MAPIE aps randomised"] = mapie_sets("aps", *arguments, include_last_label="randomized")
    return {
        "packages": {name: version(name) for name in ("mapie", "torchcp")},
        "coverage": 0.8,
        "probs": probs.tolist(),
        "labels": labels.tolist(),
        "new": new.tolist(),
        "uniform": [np.random.RandomState(SEED).uniform(size=size).tolist() for size in (60, 25)],
        "sets": {
            name: ["".join("01"[int(held)] for held in row) for row in sets] for name, sets in sets_by_method.items()
        },
    }


def judge_conformal(document: dict[str, Any]) -> int:
    bad = [row for row in document["same"] if row["equal"] < (1 - ALLOWED) * row["sets"]]
    for row in document["same"] + document["different"]:
        coverage, size = (" / ".join(f"{value:.3f}" for value in row[name]) for name in ("coverage", "size"))
        equal = f"{row['equal']} of {row['sets']} equal"
        print(
            f"{row['peer']:8} {row['case']:24} C={row['classes']:<4} {row['promised']:g}  {equal}   {coverage}   {size}"
        )
    (quantiles,) = document["intervals"]
    print(f"conformalised quantiles, MAPIE: largest difference {quantiles['difference']:.1e}")
    record.write("conformal_against_mapie", document)
    return len(bad) + (not quantiles["difference"] < 1e-9)


# --- main -------------------------------------------------------------------------------------------------------------

INSIDE: dict[str, Callable[[], dict[str, Any]]] = {"laplace": laplace_torch, "conformal": conformal, "frozen": frozen}
PEERS: dict[str, tuple[peer_environment.Packages, Callable[[dict[str, Any]], int]]] = {
    "laplace": (peer_environment.LAPLACE_TORCH, judge_laplace_torch),
    "conformal": (peer_environment.CONFORMAL, judge_conformal),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", nargs="?", choices=list(PEERS), help="comparison to run (default: both)")
    parser.add_argument("--venv", type=Path, help="folder of the virtual environment (only for a single comparison)")
    parser.add_argument(
        "--frozen", action="store_true", help="print the reference for tests/library/test_conformal_reference.py"
    )
    parser.add_argument("--inside", choices=list(INSIDE), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        warnings.simplefilter("ignore")
        json.dump(INSIDE[options.inside](), sys.stdout)
        return 0
    failed = 0
    for name in ["conformal"] if options.frozen else [options.peer] if options.peer else list(PEERS):
        packages, judge = PEERS[name]
        python = peer_environment.prepare(options.venv or peer_environment.cache_folder(packages), packages)
        if options.frozen:
            print(json.dumps(peer_environment.run(python, "peers.py", "--inside", "frozen")))
        else:
            failed += judge(peer_environment.run(python, "peers.py", "--inside", name))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
