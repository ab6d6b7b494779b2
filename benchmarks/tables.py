"""Compare `mola.MolaClassifier` with scikit-learn's classifiers on ten tables that scikit-learn contains or generates.

    python benchmarks/tables.py [--splits 5]
    python benchmarks/tables.py --quick

Each table is split at random into 70 % training and 30 % test rows, and all methods see the same splits. Every method has its default
settings, behind a `StandardScaler` where it needs one. The default learning rate and weight decay of MolaClassifier were chosen on two
of the splits of nine of these tables, which favours it slightly.

- `log loss`, `accuracy` and `seconds` (CPU time of `fit`, with one thread) on the test rows.
- `sets`: coverage and mean size of 90 % prediction sets of the methods in `WITH_SETS`, trained on 80 % of the training rows and
    calibrated on the rest: MolaClassifier by `mola.prediction_sets`, and the others by MAPIE's `SplitConformalClassifier`
    (`pip install --no-deps mapie==1.6.0`).
- `outliers`: AUROC for telling changed test rows from test rows, by each method's own score (`ood_score`; `1 - confidence` of
    classifiers; `score_samples` of scikit-learn's outlier detectors). In `shuffled` rows, each column is permuted over the rows; in
    `wrong unit` rows, one column has ten times its distance from the mean; `far` rows are ten times as far from the mean in all columns.

Errors in the record are standard errors over the splits.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import record
import torch
from mapie.classification import SplitConformalClassifier
from sklearn import datasets
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import HistGradientBoostingClassifier, IsolationForest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import StratifiedShuffleSplit, train_test_split
from sklearn.neighbors import LocalOutlierFactor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import molaplace as mola

Data = tuple[np.ndarray, np.ndarray]

TEST = 0.3
CALIBRATION = 0.2
COVERAGE = 0.9
SHIFT = 10.0
"""Factor by which the far rows and the columns in wrong units are farther from the mean."""


def diabetes() -> Data:
    rows, targets = datasets.load_diabetes(return_X_y=True)
    return rows, (targets > np.median(targets)).astype(int)


def hastie() -> Data:
    rows, labels = datasets.make_hastie_10_2(2000, random_state=0)
    return rows, (labels > 0).astype(int)


def generated(**options: Any) -> Callable[[], Data]:
    return lambda: datasets.make_classification(random_state=0, **options)


TABLES: dict[str, Callable[[], Data]] = {
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "iris": lambda: datasets.load_iris(return_X_y=True),
    "diabetes, above the median": diabetes,
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "almost linear": generated(
        n_samples=1000, n_redundant=5, n_informative=5, n_clusters_per_class=1, flip_y=0.05, class_sep=0.7
    ),
    "1 in 20 positive": generated(n_samples=2000, n_informative=8, weights=[0.95], flip_y=0.01),
    "95 noise columns": generated(n_samples=1000, n_features=100, n_informative=5, n_redundant=0, flip_y=0.02),
    "two moons": lambda: datasets.make_moons(1000, noise=0.3, random_state=0),
    "sphere in 10 dimensions": hastie,
}
OURS = "MolaClassifier"
CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    OURS: lambda seed: mola.MolaClassifier(random_state=seed),
    "LogisticRegression": lambda seed: make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    "HistGradientBoosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
    "CalibratedClassifierCV(HistGradientBoosting)": lambda seed: CalibratedClassifierCV(
        HistGradientBoostingClassifier(random_state=seed)
    ),
}
WITH_SETS = (OURS, "LogisticRegression", "HistGradientBoosting")
DETECTORS: dict[str, Callable[[int], Any]] = {
    "IsolationForest": lambda seed: IsolationForest(random_state=seed),
    "LocalOutlierFactor": lambda seed: make_pipeline(StandardScaler(), LocalOutlierFactor(novelty=True)),
}


def strange_rows(train: np.ndarray, test: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Return test rows that were changed in three ways."""
    generator = np.random.default_rng(seed)
    mean = train.mean(0)
    wrong = test.copy()
    rows = np.arange(len(test))
    columns = generator.choice(np.flatnonzero(train.std(0) > 0), len(test))
    wrong[rows, columns] = mean[columns] + SHIFT * (test[rows, columns] - mean[columns])
    return {"shuffled": generator.permuted(test, axis=0), "wrong unit": wrong, "far": mean + SHIFT * (test - mean)}


def outlier_scores(model: Any, rows: np.ndarray) -> np.ndarray:
    if isinstance(model, mola.MolaClassifier):
        return model.ood_score(rows)
    if hasattr(model, "predict_proba"):
        return -model.predict_proba(rows).max(1)
    return -model.score_samples(rows)


def detection(model: Any, test: np.ndarray, strange: dict[str, np.ndarray]) -> dict[str, float]:
    inside = outlier_scores(model, test)
    truth = np.repeat([0, 1], len(test))
    return {name: roc_auc_score(truth, np.r_[inside, outlier_scores(model, rows)]) for name, rows in strange.items()}


def sets(
    name: str, train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, seed: int
) -> dict[str, float]:
    """Return coverage and mean size of prediction sets, calibrated on rows that were not used for training."""
    fit_rows, rest, fit_labels, rest_labels = train_test_split(
        train, labels, test_size=CALIBRATION, stratify=labels, random_state=seed
    )
    model = CLASSIFIERS[name](seed).fit(fit_rows, fit_labels)
    if name == OURS:
        targets = torch.from_numpy(np.searchsorted(model.classes_, rest_labels))
        chosen = mola.prediction_sets(model.prediction(rest), targets, coverage=COVERAGE)
        members = np.asarray(chosen(model.prediction(test)))
    else:
        conformal = SplitConformalClassifier(model, confidence_level=COVERAGE, prefit=True)
        conformal.conformalize(rest, rest_labels)
        members = conformal.predict_set(test)[1][..., 0]
    covered = members[np.arange(len(truth)), np.searchsorted(model.classes_, truth)]
    return {"coverage": float(covered.mean()), "size": float(members.sum(1).mean())}


def measure(title: str, splits: int) -> list[dict[str, Any]]:
    """Return a row for each method with the mean and standard error of each metric over the splits."""
    rows, labels = TABLES[title]()
    results: dict[str, list[dict[str, float]]] = {}
    for seed, (train, test) in enumerate(
        StratifiedShuffleSplit(splits, test_size=TEST, random_state=0).split(rows, labels)
    ):
        strange = strange_rows(rows[train], rows[test], seed)
        for name, build in CLASSIFIERS.items():
            start = time.process_time()
            model = build(seed).fit(rows[train], labels[train])
            seconds = time.process_time() - start
            probs = model.predict_proba(rows[test])
            metrics = {
                "log_loss": log_loss(labels[test], probs, labels=model.classes_),
                "accuracy": float((model.classes_[probs.argmax(1)] == labels[test]).mean()),
                "seconds": seconds,
                **detection(model, rows[test], strange),
            }
            if name in WITH_SETS:
                metrics |= sets(name, rows[train], labels[train], rows[test], labels[test], seed)
            results.setdefault(name, []).append(metrics)
        for name, build in DETECTORS.items():
            start = time.process_time()
            model = build(seed).fit(rows[train])
            seconds = time.process_time() - start
            results.setdefault(name, []).append({"seconds": seconds, **detection(model, rows[test], strange)})
    print(title, flush=True)
    return [{"table": title, "method": name, **summary(values)} for name, values in results.items()]


def summary(values: list[dict[str, float]]) -> dict[str, Any]:
    columns = {name: np.array([metrics[name] for metrics in values]) for name in values[0]}
    return {
        name: {"mean": float(column.mean()), "error": float(column.std(ddof=1) / len(column) ** 0.5)}
        for name, column in columns.items()
    }


def main() -> None:
    """Measure the chosen tables, and keep the other rows of the last record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=5, help="number of random splits of each table")
    parser.add_argument("--only", nargs="*", choices=TABLES, default=list(TABLES), help="tables to measure")
    parser.add_argument("--quick", action="store_true", help="measure two small tables, and write no file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mola.MolaClassifier(epochs=1).fit(*datasets.load_iris(return_X_y=True))  # the first optimiser imports torch._dynamo
    if arguments.quick:
        for row in measure("iris", 2) + measure("wine", 2):
            print(row)
        return
    for title in arguments.only:
        compared = measure(title, arguments.splits)
        rows = record.read("tables")["rows"] if record.exists("tables") else []
        rows = [row for row in rows if row["table"] != title] + compared
        rows.sort(key=lambda row: list(TABLES).index(row["table"]))
        environment = record.environment("scikit-learn", "mapie")
        record.write("tables", {"environment": environment, "splits": arguments.splits, "rows": rows})


if __name__ == "__main__":
    main()
