"""Laplace approximations of whole networks in suites."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import molaplace as mola
from molaplace.errors import collect_warnings
from molaplace_lab.context import RESUMED, Context
from molaplace_lab.methods import RULES, FittedMethod


@dataclass(frozen=True)
class WholeNetworks:
    """A mixture of Laplace approximations for all or some of the weights of the run's networks, with linearised predictions."""

    name: str
    structure: str | None = None
    subnetwork: int | None = None
    """Maximum number of weights that the approximation covers; a smaller network is covered completely."""
    components: int | None = None
    group: str = "main"

    def settings(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        covered = "all layers" if self.subnetwork is None else f"{self.subnetwork} weights"
        structure = self.structure or ("kron" if self.subnetwork is None else "full")
        return {"weights": "uniform", "structure": structure, "covers": covered, "link": "probit", "rule": "threshold"}

    def fit(self, context: Context) -> FittedMethod:
        """Fit a posterior on all training images and tune it on the validation images, or load a saved posterior."""
        start = time.perf_counter()
        networks = context.networks[: self.components]
        models = [network.load().to(context.device) for network in networks]
        held_out = context.sources["validation"].checksum
        identity = ([network.checksum for network in networks], self.settings(), held_out, context.threshold)
        folder = context.folder("whole", *identity)
        with collect_warnings() as notes:
            if (folder / "posterior.json").exists():
                posterior = mola.load(folder, models)
            else:
                sizes = [
                    sum(weight.numel() for weight in model.parameters() if weight.requires_grad) for model in models
                ]
                posterior = mola.whole.fit(
                    models,
                    context.sources["train"],
                    context.sources["validation"],
                    rule=RULES["threshold"](context.threshold),
                    structure=self.structure,
                    subnetwork=None if self.subnetwork is None else min(self.subnetwork, *sizes),
                    progress=False,
                )
                posterior.save(folder)
        chosen = {"prior_precision": list(posterior.prior_precision), "notes": [*notes, RESUMED]}
        return FittedMethod(
            lambda name: context.predictions(name, {folder.name: [posterior]}),
            lambda members, _: members[0].with_scores(predictors=1),
            chosen,
            time.perf_counter() - start,
        )
