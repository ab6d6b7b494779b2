"""Tables with scikit-learn: calibration in cross-validation, and an alarm for rows in the wrong units.

    python examples/tabular.py

`mola.MolaClassifier` is a scikit-learn estimator and works in pipelines and cross-validation. This example compares
`MolaClassifier`, logistic regression and `MLPClassifier` on chemical measurements of 178 wines, then makes predictions for rows
that contain mistakes. Takes about twenty seconds. Needs `pip install 'molaplace[sklearn]'`.
"""

import argparse
import warnings

import numpy as np
import torch
from sklearn.datasets import load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import StratifiedKFold, cross_val_predict, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import molaplace as mola

SPLITS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)  # small networks run faster on one thread
    wine = load_wine()
    rows, labels = wine.data, wine.target

    compare(rows, labels, seed)
    raise_alarms(rows, labels, wine.feature_names, seed)


def compare(rows, labels, seed: int) -> None:
    """Compare the out-of-fold probabilities of four models."""
    models = {
        "logistic regression": LogisticRegression(max_iter=1000),
        "MLPClassifier": MLPClassifier((64,), max_iter=300, random_state=seed),
        "MolaClassifier, 1 network": mola.MolaClassifier(members=1, random_state=seed),
        "MolaClassifier, 5 networks": mola.MolaClassifier(random_state=seed),
    }
    folds = StratifiedKFold(3, shuffle=True, random_state=seed)
    print(f"{'3-fold cross-validation':28}{'accuracy %':>12}{'log loss':>10}{'ECE %':>8}{'confidence %':>14}")
    for name, model in models.items():
        # MolaClassifier also standardises its inputs, but the pipeline gives all models the same inputs.
        pipeline = make_pipeline(StandardScaler(), model)
        with warnings.catch_warnings():
            # MLPClassifier warns that it reached max_iter, but that many iterations are enough here.
            warnings.simplefilter("ignore", ConvergenceWarning)
            probs = cross_val_predict(pipeline, rows, labels, cv=folds, method="predict_proba")
        print(
            f"{name:28}{100 * accuracy_score(labels, probs.argmax(1)):12.1f}{log_loss(labels, probs):10.3f}"
            f"{100 * calibration_error(probs, labels):8.1f}{100 * probs.max(1).mean():14.1f}"
        )


def raise_alarms(rows, labels, names, seed: int) -> None:
    """Print the shares of correct rows and of rows with mistakes that raise the alarm, averaged over several splits."""
    shares: dict[str, list] = {}
    for split in range(SPLITS):
        parts = train_test_split(rows, labels, test_size=0.5, stratify=labels, random_state=SPLITS * seed + split)
        train, rest, train_labels, _ = parts
        held_out, test = rest[::2], rest[1::2]
        model = mola.MolaClassifier(random_state=SPLITS * seed + split).fit(train, train_labels)

        # Choose the threshold on held-out rows, so that at most one correct row in ten raises the alarm.
        threshold = mola.alarm_threshold(model.ood_score(held_out), 0.1)
        low, high = train.min(0), train.max(0)
        margin = 0.5 * (high - low)
        for name, some in mistakes(test, names).items():
            alarm = model.ood_score(some) > threshold
            outside = ((some < low - margin) | (some > high + margin)).any(1)
            confidence = model.predict_proba(some).max(1)
            shares.setdefault(name, []).append((alarm.mean(), outside.mean(), confidence.mean()))

    print(f"\n{len(test)} test rows, without and with mistakes; means over {SPLITS} splits:\n")
    print(f"{'':34}{'alarm by ood_score':>20}{'column out of range':>24}{'confidence':>13}")
    for name, splits in shares.items():
        alarm, outside, confidence = np.mean(splits, axis=0)
        print(f"{name:34}{alarm:20.0%}{outside:24.0%}{confidence:13.1%}")
    print(
        "\nThe score detects rows that differ from the training rows, also by unusual combinations of values within their ranges,"
        "\nbut it misses some single values that are out of range. A range check detects these. Use both."
    )


def calibration_error(probs, labels, bins: int = 10) -> float:
    """Return the expected calibration error: the gap between confidence and accuracy, averaged over confidence bins."""
    confidence, right = probs.max(1), probs.argmax(1) == labels
    bin_of_row = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs((confidence[bin_of_row == index] - right[bin_of_row == index]).sum()) for index in range(bins)]
    return float(sum(gaps) / len(labels))


def mistakes(rows, names):
    """Return the correct rows, and copies with typical data-entry mistakes, keyed by description."""

    def scaled(name: str, factor: float):
        changed = rows.copy()
        changed[:, names.index(name)] *= factor
        return changed

    swapped = rows.copy()
    first, second = names.index("alcohol"), names.index("malic_acid")
    swapped[:, [first, second]] = swapped[:, [second, first]]
    return {
        "correct": rows,
        "alcohol by weight, not volume": scaled("alcohol", 0.79),
        "ash in the wrong unit (x 10)": scaled("ash", 10),
        "magnesium in wrong unit (x 0.1)": scaled("magnesium", 0.1),
        "alcohol and malic acid swapped": swapped,
        "columns in reverse order": rows[:, ::-1],
        "each column from another wine": np.random.default_rng(0).permuted(rows, axis=0),
        "all columns x 100": 100 * rows,
        "all columns missing (0)": 0 * rows,
    }


if __name__ == "__main__":
    main()
