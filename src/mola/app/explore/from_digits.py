"""The digits demo as something to explore: trained, fitted and tuned here, in seconds, on data that come with scikit-learn."""

from __future__ import annotations

import torch

from mola.app.explore.ood_examples import ood_examples
from mola.app.explore.reference import Reference
from mola.app.explore.sight import Sight
from mola.app.explore.subject import Example, Subject
from mola.app.jobs.material import Progress
from mola.app.jobs.preparation import Intake
from mola.compare.demo_result import DemoSettings
from mola.compare.methods import four_methods
from mola.lab.data.embedded import CLASSES, SIDE, load_digits
from mola.lab.demo import build_network, one_thread
from mola.training import Recipe, train_ensemble

__all__ = ["digits_subject"]

TRAINED = 0.95
"""Share of the work that training is, as measured."""


def digits_subject(progress: Progress = lambda doing, done: None, settings: DemoSettings | None = None) -> Subject:
    """Train the demo's networks, fit and tune their mixture.

    Args:
        progress: told what is being done, and which share of the work is done.
        settings: seed, number of networks and epochs; None is the demo's own.

    Returns:
        The subject: the networks and the posterior are those of `mola demo` with the same settings.
    """
    settings = settings or DemoSettings()
    progress("reading the digits", 0.0)
    digits = load_digits(settings.seed)

    def trained(member: int, epoch: int) -> None:
        done = (member + epoch / settings.epochs) / settings.members
        progress(f"training network {member + 1} of {settings.members}", TRAINED * done)

    with one_thread():
        recipe = Recipe(epochs=settings.epochs)
        networks = train_ensemble(
            build_network, digits.train, recipe, members=settings.members, seed=settings.seed, on_epoch=trained
        )
        progress("fitting and tuning", TRAINED)
        posterior = four_methods(networks, digits.train.batches(), digits.val.batches())["MoLA"]
        reference = Reference.of(posterior.predict(digits.val.inputs).ood_score, "digits:val")
    sight = Sight.of((1, SIDE, SIDE), Intake(mode="L", shape=(1, SIDE, SIDE)))
    examples = []
    for label in range(CLASSES):
        place = int(torch.nonzero(digits.test.labels == label)[0])
        examples.append(Example(f"a test digit, {label}", (digits.test.inputs[place] * 255).round().to(torch.uint8)))
    progress("done", 1.0)
    return Subject(
        title="handwritten digits, 8 x 8 pixels",
        source=f"{settings.members} small networks, trained just now on scikit-learn's digits",
        posterior=posterior,
        classes=tuple(str(label) for label in range(CLASSES)),
        sight=sight,
        reference=reference,
        examples=(*examples, *ood_examples(sight)),
    )
