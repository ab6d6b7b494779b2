"""Definitions of a suite's comparisons: the paper's main comparison and its ablations."""

from __future__ import annotations

from molaplace_lab.dropout import DropoutMixture
from molaplace_lab.methods import RULES, WEIGHTS, LastLayerMethod, Method
from molaplace_lab.mimo import MimoHeads
from molaplace_lab.scaling import ScaledEnsemble
from molaplace_lab.suite import Budget
from molaplace_lab.swag import SwagMixture
from molaplace_lab.whole import WholeNetworks

STRUCTURES = ("diag", "kron", "kron-exact", "full")
LINKS = ("probit", "probit-centred", "mean-field", "bridge", "mc")

LONG = ("beyond", "whole", "dropout")
"""Comparisons that run whole networks and take long: "beyond" covers methods that train networks, "whole" covers Laplace approximations
of whole networks, and "dropout" covers Monte Carlo dropout, for networks that were trained with dropout. Reports add the methods of these
comparisons to the tables of the "main" comparison."""

SEPARATE = (*LONG, "scaling", "tempered", "many-classes")
"""Comparisons that are not part of "all". "scaling" calibrates the ensemble's logits with more parameters than a temperature; reports
add its methods to the tables of the "main" comparison. "tempered" applies Laplace approximations after temperature scaling and is
intended for underconfident networks. "many-classes" covers the structures and links that are feasible with a thousand classes."""

COMPARISONS = ("main", "variants", "structures", "components", "rules", "weights", *SEPARATE)
"""All comparisons, in order: the paper's last-layer methods; LLLA with every structure and link; MoLA with every structure; mixtures
of every size; rules for the prior precision; mixture weights; and the comparisons in `SEPARATE`."""


def methods_of(comparison: str, budget: Budget, sweep: int) -> list[Method]:
    """Return the methods in one of the `COMPARISONS`.

    `budget` applies only to methods that train networks, and `sweep` is the size of the largest mixture in "components".
    """
    methods: dict[str, list[Method]] = {
        "main": [
            LastLayerMethod("MAP", components=1, detectors=True),
            LastLayerMethod("MAP-T", components=1, temperature=True, detectors=True),
            LastLayerMethod("DE", detectors=True),
            LastLayerMethod("DE-T", temperature=True, detectors=True),
            LastLayerMethod("DE-L", temperature=True, mean="logits", detectors=True),
            LastLayerMethod("LLLA", components=1, structure="kron", detectors=True),
            LastLayerMethod("MoLA", structure="kron", detectors=True),
            LastLayerMethod("MoLA (NLL)", structure="kron", rule="nll", detectors=True),
            LastLayerMethod("LLLA (distance)", components=1, structure="kron", rule="distance", detectors=True),
            LastLayerMethod("MoLA (distance)", structure="kron", rule="distance", detectors=True),
            LastLayerMethod("LLLA (calibrated)", components=1, structure="kron", rule="calibrated", detectors=True),
            LastLayerMethod("MoLA (calibrated)", structure="kron", rule="calibrated", detectors=True),
        ],
        "beyond": [
            SwagMixture("SWAG", budget.swag, components=1),
            SwagMixture("MultiSWAG", budget.swag),
            MimoHeads(LastLayerMethod("MIMO", detectors=True), budget.mimo),
            MimoHeads(LastLayerMethod("MIMO-MoLA", structure="full", detectors=True), budget.mimo),
        ],
        "scaling": [
            ScaledEnsemble("JUCAL", "jucal"),
            ScaledEnsemble("DE-SVS", "svs"),
            ScaledEnsemble("DE-SMS", "sms"),
        ],
        "whole": [
            WholeNetworks("MoLA (all layers)", structure="kron"),
            WholeNetworks("MoLA (subnetwork)", subnetwork=1000),
        ],
        "dropout": [
            DropoutMixture("MC dropout"),
            DropoutMixture("MC dropout-T", temperature=True),
        ],
        "variants": [
            LastLayerMethod(f"LLLA {structure} {link}", "variants", 1, structure, link)
            for structure in STRUCTURES
            for link in LINKS
        ],
        "structures": [
            LastLayerMethod(f"MoLA {structure} {rule}", "structures", None, structure, rule=rule)
            for structure in STRUCTURES
            for rule in ("threshold", "nll")
        ],
        "components": [
            method
            for count in range(1, sweep + 1)
            for method in (
                LastLayerMethod(f"DE K={count}", "components", count),
                LastLayerMethod(f"DE-T K={count}", "components", count, temperature=True),
                LastLayerMethod(f"DE-L K={count}", "components", count, temperature=True, mean="logits"),
                LastLayerMethod(f"MoLA K={count}", "components", count, "kron"),
                LastLayerMethod(f"MoLA (distance) K={count}", "components", count, "kron", rule="distance"),
                LastLayerMethod(f"MoLA (calibrated) K={count}", "components", count, "kron", rule="calibrated"),
            )
        ],
        "rules": [LastLayerMethod(f"MoLA by {rule}", "rules", None, "kron", rule=rule) for rule in RULES],
        "weights": [
            LastLayerMethod(f"MoLA with {weights} weights", "weights", None, "kron", weights=weights)
            for weights in WEIGHTS
        ],
        "tempered": [
            LastLayerMethod("LLLA-T", "tempered", 1, "kron", temperature=True, detectors=True),
            *(
                LastLayerMethod(
                    f"MoLA-T by {rule}", "tempered", None, "kron", rule=rule, temperature=True, detectors=True
                )
                for rule in ("threshold", "nll", "distance")
            ),
        ],
        # The mean-field link is excluded: with C = 1000 classes, it processes C x C pairs of classes for each input and each
        # candidate prior precision, which takes half an hour per method.
        "many-classes": [
            LastLayerMethod(f"MoLA {structure} {link} by NLL", "many-classes", None, structure, link, rule="nll")
            for structure in ("diag", "kron", "kron-diag", "kron-exact")
            for link in ("probit", "probit-centred")
        ],
    }
    return methods[comparison]
