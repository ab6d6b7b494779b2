"""Methods with a Laplace approximation of whole networks: all layers, or the weights of largest variance."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import mola.whole
from mola.compare.methods import RULES, Fitted, noting
from mola.compare.tally import Answer
from mola.lab.suite import Source
from mola.lab.swag_mimo import TAKEN_UP
from mola.lab.workshop import Context, StoredPrediction
from mola.saving.files import DOCUMENT
from mola.whole import WholeMoLA


@dataclass(frozen=True)
class WholeNetworks:
    """The mixture of Laplace approximations of the run's networks, all their weights or some, predicting by linearisation."""

    name: str
    structure: str | None = None
    subnetwork: int | None = None
    """So many weights, or all where a network has fewer."""
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """What makes it, as plain JSON values."""
        covered = "all layers" if self.subnetwork is None else f"{self.subnetwork} weights"
        structure = self.structure or ("kron" if self.subnetwork is None else "full")
        return {"weights": "uniform", "structure": structure, "covers": covered, "link": "probit", "rule": "threshold"}

    def fit(self, context: Context) -> Fitted:
        """Fit on all training images and tune on the validation images, or load what was fitted before."""
        workshop, start = context.workshop, time.perf_counter()
        networks = context.networks[: self.components]
        models = [workshop.load(network) for network in networks]
        held_out = workshop.sources["validation"].checksum
        identity = ([network.checksum for network in networks], self.settings(), held_out, context.threshold)
        folder = workshop.folder("whole", *identity)
        with noting() as notes:
            posterior = self._posterior(models, context, folder)
        seconds = time.perf_counter() - start

        def batches(name: str) -> Iterator[tuple[list[StoredPrediction], Tensor]]:
            asked = workshop.opinions.ask(folder.name, workshop.sources[name], lambda: [posterior])
            return context.labelled(name, [asked])

        def answer(found: list[StoredPrediction], scores: bool) -> Answer:
            return found[0].answer(voices=1)

        chosen = {"prior_precision": list(posterior.prior_precision), "notes": [*notes, TAKEN_UP]}
        return Fitted(batches, answer, chosen, seconds)

    def _posterior(self, models: list[nn.Module], context: Context, folder: Path) -> WholeMoLA:
        if (folder / DOCUMENT).exists():
            return mola.whole.load(folder, models)
        sources = context.workshop.sources
        sizes = [sum(one.numel() for one in model.parameters() if one.requires_grad) for model in models]
        posterior = mola.whole.fit(
            models,
            Reopened(sources["train"]),
            structure=self.structure,
            subnetwork=None if self.subnetwork is None else min(self.subnetwork, *sizes),
            progress=False,
        )
        posterior = posterior.tune(
            Reopened(sources["validation"]), rule=RULES["threshold"](context.threshold), progress=False
        )
        posterior.save(folder)
        return posterior


class Reopened:
    """A source as a loader, which can be read again."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.source.open())
