"""Definitions of a suite's comparisons: the paper's main comparison and its ablations."""

from __future__ import annotations

from molaplace_lab.context import Context
from molaplace_lab.long_methods import MimoHeads, SwagMixture, WholeNetworks
from molaplace_lab.methods import RULES, WEIGHTS, LastLayer, Method
from molaplace_lab.suite import Budget

SuiteMethod = Method[Context]

SWEEP = 10
"""Size of the largest mixture in the comparison of mixture sizes."""

STRUCTURES = ("diag", "kron", "kron-exact", "full")
LINKS = ("probit", "probit-centred", "mean-field", "bridge", "mc")

LONG = ("beyond", "whole")
"""Comparisons that take hours: "beyond" covers methods that train networks, and "whole" covers Laplace approximations of whole
networks. Reports add the methods of these comparisons to the tables of the "main" comparison."""

NAMED = (*LONG, "tempered", "many-classes")
"""Comparisons that are not part of "all". "tempered" applies Laplace approximations after temperature scaling and is intended for
underconfident networks. "many-classes" covers the structures and links that are feasible with a thousand classes."""

COMPARISONS = ("main", "variants", "structures", "components", "rules", "weights", *NAMED)
"""All comparisons, in order: the paper's last-layer methods; LLLA with every structure and link; MoLA with every structure; mixtures
of 1 to 10 components; rules for the prior precision; mixture weights; and the comparisons in `NAMED`."""


def methods_of(comparison: str, budget: Budget) -> list[SuiteMethod]:
    """Return the methods in one of the `COMPARISONS`; `budget` applies only to methods that train networks."""
    found: dict[str, list[SuiteMethod]] = {
        "main": [
            LastLayer("MAP", components=1, detectors=True),
            LastLayer("MAP-T", components=1, temperature=True, detectors=True),
            LastLayer("DE", detectors=True),
            LastLayer("DE-T", temperature=True, detectors=True),
            LastLayer("DE-L", temperature=True, mean="logits", detectors=True),
            LastLayer("LLLA", components=1, structure="kron", detectors=True),
            LastLayer("MoLA", structure="kron", detectors=True),
            LastLayer("MoLA (NLL)", structure="kron", rule="nll", detectors=True),
            LastLayer("LLLA (distance)", components=1, structure="kron", rule="distance", detectors=True),
            LastLayer("MoLA (distance)", structure="kron", rule="distance", detectors=True),
            LastLayer("LLLA (calibrated)", components=1, structure="kron", rule="calibrated", detectors=True),
            LastLayer("MoLA (calibrated)", structure="kron", rule="calibrated", detectors=True),
        ],
        "beyond": [
            SwagMixture("SWAG", budget.swag, components=1),
            SwagMixture("MultiSWAG", budget.swag),
            MimoHeads(LastLayer("MIMO", detectors=True), budget.mimo),
            MimoHeads(LastLayer("MIMO-MoLA", structure="full", detectors=True), budget.mimo),
        ],
        "whole": [
            WholeNetworks("MoLA (all layers)", structure="kron"),
            WholeNetworks("MoLA (subnetwork)", subnetwork=1000),
        ],
        "variants": [
            LastLayer(f"LLLA {structure} {link}", "variants", 1, structure, link)
            for structure in STRUCTURES
            for link in LINKS
        ],
        "structures": [
            LastLayer(f"MoLA {structure} {rule}", "structures", None, structure, rule=rule)
            for structure in STRUCTURES
            for rule in ("threshold", "nll")
        ],
        "components": [
            method
            for count in range(1, SWEEP + 1)
            for method in (
                LastLayer(f"DE K={count}", "components", count),
                LastLayer(f"DE-T K={count}", "components", count, temperature=True),
                LastLayer(f"MoLA K={count}", "components", count, "kron"),
                LastLayer(f"MoLA (distance) K={count}", "components", count, "kron", rule="distance"),
            )
        ],
        "rules": [LastLayer(f"MoLA by {rule}", "rules", None, "kron", rule=rule) for rule in RULES],
        "weights": [
            LastLayer(f"MoLA with {weights} weights", "weights", None, "kron", weights=weights) for weights in WEIGHTS
        ],
        "tempered": [
            LastLayer("LLLA-T", "tempered", 1, "kron", temperature=True, detectors=True),
            *(
                LastLayer(f"MoLA-T by {rule}", "tempered", None, "kron", rule=rule, temperature=True, detectors=True)
                for rule in ("threshold", "nll", "distance")
            ),
        ],
        # The mean-field link is excluded: with C = 1000 classes, it processes C x C pairs of classes for each input and each
        # candidate prior precision, which takes half an hour per method.
        "many-classes": [
            LastLayer(f"MoLA {structure} {link} by NLL", "many-classes", None, structure, link, rule="nll")
            for structure in ("diag", "kron", "kron-diag", "kron-exact")
            for link in ("probit", "probit-centred")
        ],
    }
    return found[comparison]
