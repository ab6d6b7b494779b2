"""The cases of `conformal_against_mapie.py`, run in the environment that has MAPIE and TorchCP; prints JSON.

Where definitions agree, sets must be equal, class by class:

- MAPIE's "lac", and its "aps" with randomised last labels, given the same random numbers;
- TorchCP's LAC, APS and RAPS without randomisation, on average and by class;
- MAPIE's conformalised quantile regression with a symmetric correction.

MAPIE's other forms of "aps" calibrate with random numbers and decide without them, and its "raps" chooses the penalty on a part of
the calibration data: other definitions, for which only coverage and size are compared.
"""

import json
import sys
import types
import warnings
from importlib.metadata import distribution, version
from unittest import mock

import numpy as np
import torch
from mapie.classification import SplitConformalClassifier
from mapie.regression import ConformalizedQuantileRegressor
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

import mola

SEED = 0


def torchcp() -> types.SimpleNamespace:
    """TorchCP's scores and predictors, without the parts of it that need graphs and sorting extensions."""
    package = types.ModuleType("torchcp")
    package.__path__ = [str(distribution("torchcp").locate_file("torchcp"))]
    sys.modules["torchcp"] = package
    sys.modules["torchsort"] = types.ModuleType("torchsort")
    sys.modules["torchsort"].soft_rank = sys.modules["torchsort"].soft_sort = None  # type: ignore[attr-defined]
    from torchcp.classification.predictor import ClassConditionalPredictor, SplitPredictor
    from torchcp.classification.score import APS, LAC, RAPS

    return types.SimpleNamespace(LAC=LAC, APS=APS, RAPS=RAPS, split=SplitPredictor, by_class=ClassConditionalPredictor)


class Given(ClassifierMixin, BaseEstimator):
    """A classifier whose inputs are the probabilities."""

    def __init__(self, classes: int = 2) -> None:
        self.classes = classes

    def fit(self, _x, _y):
        self.classes_ = np.arange(self.classes)
        self.n_features_in_ = self.classes
        return self

    def predict_proba(self, x):
        return np.asarray(x)

    def predict(self, x):
        return np.asarray(x).argmax(1)


class Column(RegressorMixin, BaseEstimator):
    """A regressor whose prediction is a column of its inputs."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def fit(self, _x, _y):
        self.fitted_ = True
        return self

    def predict(self, x):
        return np.asarray(x)[:, self.place]


def predictions(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that are too sure, and labels."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, (count, classes))
    true = np.exp(logits / 1.5)
    true /= true.sum(1, keepdims=True)
    labels = np.array([draw.choice(classes, p=row) for row in true])
    probs = np.exp(logits - logits.max(1, keepdims=True))
    return probs / probs.sum(1, keepdims=True), labels


def mapie_sets(kind, probs, labels, new, coverage, **options):
    estimator = Given(probs.shape[1]).fit(None, None)
    made = SplitConformalClassifier(estimator, coverage, kind, prefit=True, random_state=SEED)
    made.conformalize(probs, labels)
    return made.predict_set(new, conformity_score_params=options)[1][:, :, 0]


def torchcp_sets(peer, score, predictor, probs, labels, new, coverage):
    made = predictor(score, alpha=1 - coverage)
    made.calculate_threshold(torch.from_numpy(probs), torch.from_numpy(labels))
    return made.predict_with_logits(torch.from_numpy(new)).bool().numpy()


def randomised(probs, labels, new, coverage):
    """Ours with the random numbers of MAPIE, which draws them anew from the seed for either step, and subtracts them."""

    def drawn(*shape, **_):
        return torch.from_numpy(1 - np.random.RandomState(SEED).uniform(size=shape[0])).reshape(shape)

    with mock.patch("torch.rand", drawn):
        return mola.prediction_sets(probs, labels, coverage, "aps", randomised=True)(new).numpy()


def compare(name, peer, ours, theirs, labels, **about):
    rows = np.arange(len(labels))
    return {
        "peer": peer,
        "case": name,
        **about,
        "sets": len(labels),
        "equal": int((ours == theirs).all(1).sum()),
        "coverage": [float(one[rows, labels].mean()) for one in (ours, theirs)],
        "size": [float(one.sum(1).mean()) for one in (ours, theirs)],
    }


def regression(count, seed):
    draw = np.random.default_rng(seed)
    x = draw.uniform(0, 3, count)
    y = np.sin(2 * x) + draw.normal(0, 0.1 + 0.3 * x)
    low, middle, high = np.sin(2 * x) - 0.4, np.sin(2 * x), np.sin(2 * x) + 0.5
    return np.stack([low, high, middle], 1), y


class Ends:
    """Predicted quantiles, as `mola.prediction_intervals` reads them."""

    def __init__(self, columns):
        self.columns = torch.from_numpy(columns)

    @property
    def mean(self):
        return self.columns[:, 2:]

    @property
    def variance(self):
        return torch.ones_like(self.mean)

    def interval(self, _level):
        return self.columns[:, :1], self.columns[:, 1:2]


def main() -> None:
    peer = torchcp()
    same, different = [], []
    for classes, count in ((3, 200), (10, 1000), (100, 3000)):
        probs, labels = predictions(count, classes, classes)
        new, truth = predictions(2000, classes, 1000 + classes)
        for coverage in (0.8, 0.9, 0.95):
            about = {"classes": classes, "calibration": count, "promised": coverage}
            given = probs, labels, new, coverage
            ours = {
                name: mola.prediction_sets(probs, labels, coverage, name, penalty=0.02, free=2)(new).numpy()
                for name in ("lac", "aps", "raps")
            }
            same.append(compare("lac", "MAPIE", ours["lac"], mapie_sets("lac", *given), truth, **about))
            theirs = mapie_sets("aps", *given, include_last_label="randomized")
            same.append(compare("aps, randomised", "MAPIE", randomised(*given), theirs, truth, **about))
            scores = {
                "lac": peer.LAC(score_type="identity"),
                "aps": peer.APS(score_type="identity", randomized=False),
                "raps": peer.RAPS(score_type="identity", randomized=False, penalty=0.02, kreg=2),
            }
            for name, score in scores.items():
                theirs = torchcp_sets(peer, score, peer.split, *given)
                same.append(compare(name, "TorchCP", ours[name], theirs, truth, **about))
            if classes <= 10:
                by_class = mola.prediction_sets(probs, labels, coverage, by="class")(new).numpy()
                theirs = torchcp_sets(peer, scores["lac"], peer.by_class, *given)
                same.append(compare("lac, by class", "TorchCP", by_class, theirs, truth, **about))
            for label, last in (("aps, last label kept", True), ("aps, last label dropped", False)):
                theirs = mapie_sets("aps", *given, include_last_label=last)
                different.append(compare(label, "MAPIE", ours["aps"], theirs, truth, **about))
    columns, targets = regression(500, 0)
    new, truth = regression(2000, 1)
    made = ConformalizedQuantileRegressor([Column(0), Column(1), Column(2)], 0.9, prefit=True)
    made.conformalize(columns, targets)
    theirs = made.predict_interval(new, symmetric_correction=True)[1][:, :, 0]
    lower, upper = mola.prediction_intervals(Ends(columns), targets, 0.9)(Ends(new))
    ours = torch.cat([lower, upper], 1).numpy()
    intervals = {
        "peer": "MAPIE",
        "case": "conformalised quantiles",
        "promised": 0.9,
        "difference": float(np.abs(ours - theirs).max()),
        "coverage": [float(((one[:, 0] <= truth) & (truth <= one[:, 1])).mean()) for one in (ours, theirs)],
    }
    packages = {name: version(name) for name in ("mapie", "torchcp", "torch", "numpy", "scikit-learn")}
    print(json.dumps({"packages": packages, "same": same, "different": different, "intervals": [intervals]}))


def frozen() -> None:
    """A small case with what the peers make of it, for tests/library/conformal_reference.json."""
    peer = torchcp()
    probs, labels = predictions(60, 4, 1)
    new, _ = predictions(25, 4, 2)
    given = probs, labels, new, 0.8
    scores = {
        "lac": peer.LAC(score_type="identity"),
        "aps": peer.APS(score_type="identity", randomized=False),
        "raps": peer.RAPS(score_type="identity", randomized=False, penalty=0.05, kreg=1),
    }
    found = {f"TorchCP {name}": torchcp_sets(peer, score, peer.split, *given) for name, score in scores.items()}
    found["TorchCP lac by class"] = torchcp_sets(peer, scores["lac"], peer.by_class, *given)
    found["MAPIE lac"] = mapie_sets("lac", *given)
    found["MAPIE aps randomised"] = mapie_sets("aps", *given, include_last_label="randomized")
    uniform = [np.random.RandomState(SEED).uniform(size=size).tolist() for size in (60, 25)]
    sets = {name: ["".join("01"[int(held)] for held in row) for row in one] for name, one in found.items()}
    document = {
        "packages": {name: version(name) for name in ("mapie", "torchcp")},
        "coverage": 0.8,
        "probs": probs.tolist(),
        "labels": labels.tolist(),
        "new": new.tolist(),
        "uniform": uniform,
        "sets": sets,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["frozen"]:
        frozen()
    else:
        main()
