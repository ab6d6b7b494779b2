"""Methods with a Laplace approximation of whole networks: all layers, or the weights of largest variance."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import mola.whole
from mola.compare.methods import RULES, Fitted, noting
from mola.lab.context import Context
from mola.lab.swag_mimo import RESUMED
from mola.saving.files import DOCUMENT
from mola.whole import WholeMoLA


@dataclass(frozen=True)
class WholeNetworks:
    """Mixture of Laplace approximations of the run's networks, over all weights or some, with linearised predictions."""

    name: str
    structure: str | None = None
    subnetwork: int | None = None
    """Number of weights, or all weights of a smaller network."""
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        covered = "all layers" if self.subnetwork is None else f"{self.subnetwork} weights"
        structure = self.structure or ("kron" if self.subnetwork is None else "full")
        return {"weights": "uniform", "structure": structure, "covers": covered, "link": "probit", "rule": "threshold"}

    def fit(self, context: Context) -> Fitted:
        """Fit on all training images and tune on the validation images, or load the stored posterior."""
        start, networks = time.perf_counter(), context.networks[: self.components]
        models = [network.load().to(context.device) for network in networks]
        held_out = context.sources["validation"].checksum
        identity = ([network.checksum for network in networks], self.settings(), held_out, context.threshold)
        folder = context.folder("whole", *identity)
        with noting() as notes:
            posterior = self._posterior(models, context, folder)
        chosen = {"prior_precision": list(posterior.prior_precision), "notes": [*notes, RESUMED]}
        return Fitted(
            lambda name: context.predictions(name, {folder.name: lambda: [posterior]}),
            lambda found, scores: found[0].answer(predictors=1),
            chosen,
            time.perf_counter() - start,
        )

    def _posterior(self, models: list[nn.Module], context: Context, folder: Path) -> WholeMoLA:
        if (folder / DOCUMENT).exists():
            return mola.whole.load(folder, models)
        train, validation = (context.sources[name] for name in ("train", "validation"))
        sizes = [sum(one.numel() for one in model.parameters() if one.requires_grad) for model in models]
        subnetwork = None if self.subnetwork is None else min(self.subnetwork, *sizes)
        posterior = mola.whole.fit(models, train, structure=self.structure, subnetwork=subnetwork, progress=False)
        posterior = posterior.tune(validation, rule=RULES["threshold"](context.threshold), progress=False)
        posterior.save(folder)
        return posterior
