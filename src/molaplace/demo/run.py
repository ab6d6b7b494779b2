"""The demo: train networks on scikit-learn's digits, and evaluate MoLA and its baselines on rotated digits and on photographs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

import molaplace as mola
from molaplace.data.digits import load_digits
from molaplace.demo.data import natural_patches, rotate, train_digits, uniform_noise
from molaplace.errors import collect_warnings
from molaplace.evaluation import Evaluation
from molaplace.evaluation.evaluate import made_by
from molaplace.numerics import one_thread
from molaplace.progress import Progress, no_progress, part
from molaplace.saving.files import replacing

ANGLES = (15, 30, 45, 60, 90)
"""Rotation angles of the test digits in degrees."""

PATCHES, NOISE = "patches of photographs", "noise"
"""Names of the outlier sets. Both have the same size and the same range of values as the digits."""

TRAINED = 0.8
"""Share of the time until the networks are trained."""

DEMO = "demo"
NETWORKS = "networks"
"""Folder of the trained networks beside the page."""


@dataclass(frozen=True)
class DemoSettings:
    """Random seed and sizes used in the demo."""

    seed: int = 0
    members: int = 5
    """Number of networks in the ensemble."""
    epochs: int = 60
    outliers: int = 500
    """Number of inputs in each out-of-distribution set."""


@dataclass(frozen=True)
class DemoResult:
    """The networks trained on the digits, and the evaluation of all methods."""

    networks: Sequence[nn.Module]
    evaluation: Evaluation


def rotated_by(angle: int) -> str:
    """Return the name of the test digits rotated by an angle in degrees."""
    return f"rotated by {angle}°"


def run_demo(settings: DemoSettings, progress: Progress = no_progress) -> DemoResult:
    """Train the networks and evaluate all methods. Repeated runs with the same settings give identical numbers."""
    training = part(progress, 0.0, TRAINED)
    start = time.perf_counter()
    seed = settings.seed
    progress("reading the data", 0.0)
    with one_thread(), collect_warnings():
        digits = load_digits(seed)
        networks = train_digits(
            digits.train,
            members=settings.members,
            seed=seed,
            epochs=settings.epochs,
            on_epoch=lambda epoch: training("training networks", epoch / settings.epochs),
        )
        progress("fitting, tuning and scoring", TRAINED)
        train, validation = digits.train.batches(), digits.val.batches()
        posterior = mola.fit(networks, train, validation, progress=False)
        inputs, labels = digits.test.inputs, digits.test.labels
        evaluation = mola.evaluate(
            {"MoLA": posterior, **mola.baselines(posterior, validation, progress=False)},
            [(inputs, labels)],
            shifted={rotated_by(angle): [(rotate(inputs, angle), labels)] for angle in ANGLES},
            ood={
                PATCHES: [natural_patches(settings.outliers, seed=seed)],
                NOISE: [uniform_noise(settings.outliers, seed=seed)],
            },
            progress=False,
        )
    notes = (
        f"The data are scikit-learn's 1797 handwritten digits of 8 by 8 pixels, split at random into {len(digits.train)} for training, "
        f"{len(digits.val)} for tuning and {len(digits.test)} for testing. The outliers are patches of scikit-learn's two photographs, and "
        f"uniform noise.",
        f"The {settings.members} networks have two hidden layers without biases. They were trained for {settings.epochs} epochs with "
        f"little regularisation and are therefore overconfident. With strong weight decay, MoLA performs much like the ensemble.",
        "This is one run with one seed on a small data set, so small differences between methods may change sign with another seed.",
    )
    made = made_by(f"molaplace demo --seed {seed}", time.perf_counter() - start)
    return DemoResult(networks, replace(evaluation, notes=(*notes, *evaluation.notes), made=made))


def write_demo(
    result: DemoResult, directory: Path, progress: Progress = no_progress, *, overwrite: bool = False
) -> Path:
    """Write the page of the evaluation and the networks, `networks/digits-<k>.safetensors`; return the path of the page."""
    from molaplace.report.writing import PAGE, write_page  # needs matplotlib, which the data do not

    with replacing(directory, DEMO, (PAGE,), overwrite=overwrite) as folder:
        (folder / NETWORKS).mkdir()
        for index, network in enumerate(result.networks):
            save_file(network.state_dict(), folder / NETWORKS / f"digits-{index}.safetensors")
        write_page(result.evaluation, folder, progress)
    return directory / PAGE
