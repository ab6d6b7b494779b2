"""The comparison on the UCI sets: small networks for each split, all methods on the same networks, and a record for each split.

The settings follow earlier papers (Hernández-Lobato and Adams, 2015; Gal and Ghahramani, 2016; Lakshminarayanan et al., 2017): one
hidden layer of 50 ReLU units (100 for the protein set) and 40 epochs. Inputs and targets are standardised by the means and standard
deviations of the training rows. A tenth of the training rows are held out to choose the noise, prior precision and distance exponent
of every method.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import molaplace as mola
from molaplace.calibration import scale_noise
from molaplace.demo import LabelledData
from molaplace.errors import MolaWarning, StorageError
from molaplace.evaluation import PredictionColumns, measured
from molaplace.likelihoods import Gaussian
from molaplace.metrics import auroc
from molaplace_lab.files import read_document, write_document
from molaplace_lab.runner import environment
from molaplace_lab.swag import fit_swag
from molaplace_lab.training import DivergedError, Recipe, Shuffled, train_mlps
from molaplace_lab.uci.data import SETS, Split, UciSet, read_uci

FORMAT = "mola-uci"
VERSION = 1

Rows = tuple[Tensor, Tensor]
"""Pair of inputs and targets."""

MEMBERS = 5
"""Number of networks in a mixture."""

RECIPE = Recipe(epochs=40, batch_size=32, learning_rate=1e-2, weight_decay=1e-4, optimiser="adam")

HELD_OUT = 10
"""Reciprocal of the fraction of training rows that are held out."""

STRUCTURE = "kron-exact"
"""Structure of the curvature; this structure is exact for a single output with constant noise."""

RATES = (3e-2, 3e-3)
"""Learning rates for SWAG; the first rate at which training does not diverge is used."""

SWAG_BATCH = 128
SWAG_EPOCHS = 20

UCI_METHODS: tuple[str, ...] = ("MAP", "DE", "LLLA", "MoLA", "MoLA (distance)", "SWAG")
"""Names of the methods, in the order in which tables list them."""

GAP_METHODS = UCI_METHODS[:-1]


def run_uci(
    data: Path,
    results: Path,
    sets: Sequence[str] = SETS,
    *,
    splits: int | None = None,
    gaps: bool = False,
    fresh: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Path:
    """Train networks and compare methods on published splits (at most `splits` of each set), and on gap splits if `gaps` is True.

    Each record is written to the subfolder `uci` of `results` as soon as it is complete. The path of this subfolder is returned.
    Existing records with the same settings and data are kept unless `fresh` is True. `progress` is called with the name of the set,
    the number of completed splits and the total number of splits.
    """
    for name in sets:
        uci_set = read_uci(data, name)
        jobs = [
            (f"split-{number}", uci_set.split(number), UCI_METHODS) for number in range(len(uci_set.tests))[:splits]
        ]
        for feature in range(uci_set.inputs.shape[1] if gaps else 0):
            if len(set(uci_set.inputs[:, feature].tolist())) > 2:  # a feature with two values has no middle third
                jobs.append((f"gap-{feature}", uci_set.gap(feature), GAP_METHODS))
        for done, (label, split, methods) in enumerate(jobs):
            progress(name, done, len(jobs))
            path = results / "uci" / name / f"{label}.json"
            settings = _settings(uci_set, methods)
            if not fresh and path.exists():
                record = read_document(path, FORMAT, VERSION)
                if record["settings"] == settings and record["data"] == uci_set.checksum:
                    continue
            seed = int(label.rpartition("-")[2]) + (1000 if label.startswith("gap") else 0)
            document = {
                "format": FORMAT,
                "version": VERSION,
                "set": name,
                "split": label,
                "settings": settings,
                "data": uci_set.checksum,
                "methods": compare(uci_set, split, methods, seed=seed),
                "environment": environment(),
            }
            write_document(path, document)
        progress(name, len(jobs), len(jobs))
    return results / "uci"


def _settings(data: UciSet, methods: Sequence[str]) -> dict[str, Any]:
    return {
        "methods": list(methods),
        "members": MEMBERS,
        "hidden": data.hidden,
        "recipe": RECIPE.describe(),
        "held_out": HELD_OUT,
        "structure": STRUCTURE,
        "swag": {"learning_rates": list(RATES), "epochs": SWAG_EPOCHS, "batch_size": SWAG_BATCH},
    }


def read_records(results: str | Path) -> list[dict[str, Any]]:
    """Read all UCI records in a results folder."""
    folder = Path(results) / "uci"
    records = [read_document(path, FORMAT, VERSION) for path in sorted(folder.glob("*/*.json"))]
    if not records:
        raise StorageError(
            f"{folder} contains no records. Create records with: python -m molaplace_lab bench uci --data DIR"
        )
    return records


def compare(data: UciSet, split: Split, methods: Sequence[str], *, seed: int) -> dict[str, dict[str, float]]:
    """Train the networks for a split, and score the methods on the test rows. The seed determines the networks and the held-out rows.

    The scores on the test rows are "rmse", "nll", "crps", "coverage" (of 90 % intervals), "std" and "epistemic" (the epistemic share
    of the variance). "std_inside" is the standard deviation on the validation rows, and "ood" is the AUROC of the OOD score for
    distinguishing test rows from validation rows.
    """
    inputs = split.train[0].float()
    targets = split.train[1].float()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    held_out = order[: len(order) // HELD_OUT]
    fitted = order[len(order) // HELD_OUT :]
    networks = train_mlps(
        inputs.shape[1],
        (data.hidden,),
        1,
        LabelledData(inputs[fitted], targets[fitted]),
        RECIPE,
        members=MEMBERS,
        seed=seed,
        loss="squared-error",
    )
    in_units = targets.double() * split.scale + split.location
    train, validation = ((inputs[rows], in_units[rows]) for rows in (fitted, held_out))
    scores_by_method = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MolaWarning)  # ignore the rules' warnings about small validation sets
        for method in methods:
            start = time.perf_counter()
            predictor = _predictor(method, networks, split, train, validation, seed)
            scores = _scores(predictor, validation[0], split.test[0].float(), split.test[1])
            scores_by_method[method] = scores | {"seconds": time.perf_counter() - start}
    return scores_by_method


def _predictor(
    method: str, networks: Sequence[nn.Module], split: Split, train: Rows, validation: Rows, seed: int
) -> Any:
    likelihood = Gaussian(location=split.location, scale=split.scale)
    if method in ("MAP", "LLLA", "SWAG"):
        networks = networks[:1]
    if method in ("MAP", "DE"):
        return scale_noise(mola.ensemble(networks, likelihood=likelihood), [validation])
    if method == "SWAG":
        standardised = LabelledData(train[0], ((train[1] - split.location) / split.scale).float())
        draws = _swag_draws(networks[0], standardised, seed)
        return scale_noise(mola.ensemble(draws, likelihood=likelihood), [validation])
    rule = "distance" if "distance" in method else "nll"
    options: dict[str, Any] = {"structure": STRUCTURE, "rule": rule, "likelihood": likelihood, "progress": False}
    return mola.fit(networks, [train], [validation], **options)


def _swag_draws(network: nn.Module, train: LabelledData, seed: int) -> list[nn.Module]:
    loader = Shuffled(train, SWAG_BATCH)
    options: dict[str, Any] = {"epochs": SWAG_EPOCHS, "weight_decay": RECIPE.weight_decay, "loss": "squared-error"}
    for rate in RATES:
        try:
            return fit_swag(network, loader, learning_rate=rate, seed=seed, progress=False, **options)
        except DivergedError as error:
            diverged = error
    raise diverged


def _scores(predictor: Any, held_out: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    predicted: mola.RegressionPrediction = predictor.predict(inputs)
    inside: mola.RegressionPrediction = predictor.predict(held_out)
    columns = PredictionColumns()
    columns.add(predicted, targets)
    measurements = measured(columns)
    names = {"rmse": "rmse", "nll": "nll", "crps": "crps", "coverage": "coverage_90", "std": "std"}
    return {
        **{name: measurements[metric].value for name, metric in names.items()},
        "std_inside": float(inside.std.double().mean()),
        "epistemic": float((predicted.epistemic / predicted.variance).double().mean()),
        "ood": float(auroc(inside.ood_score, predicted.ood_score)),
        "noise": float(predicted.aleatoric.mean().sqrt()),
        **_tuned(predictor),
    }


def _tuned(predictor: Any) -> dict[str, float]:
    # Return the prior precision of the first network, and the other settings that are not neutral.
    if getattr(predictor, "structure", None) is None:
        return {}
    return {"prior_precision": predictor.prior_precision[0], **predictor.settings.changed()}
