"""Error of each link against Monte Carlo with very many samples, on the logits of a real network.

    python benchmarks/links_against_monte_carlo.py --data DIR --networks DIR [--cache DIR] [--network 0]

A link approximates the integral of the softmax over Gaussian logits. On 1000 test images of CIFAR-10 and 1000 of SVHN, with
the prior precision that the threshold rule or the validation log-loss picks for each structure (probit link, 2000 of the test
images held out), this prints how far each link is from 100,000 samples. A second table asks another question: how well each
link predicts when the prior precision is tuned for it. A third shows where the variance of the logits lies, which explains the
second. All are Markdown, as in docs/links.md.
"""

import argparse
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import cifar10
import record
import torch
from torch import Tensor, nn

import mola
from mola import Rule, metrics

STRUCTURES = ("kron", "kron-exact", "diag", "full")
RULES = {"threshold": mola.ConfidenceThreshold(), "validation NLL": mola.ValidationScore("nll")}
LINKS = {
    "probit": mola.Probit(),
    "probit-centered": mola.CentredProbit(),
    "mean-field": mola.MeanField(),
    "bridge": mola.Bridge(),
    "bridge, normalised": mola.Bridge(normalised=True),
    "mc, 100 samples": mola.MonteCarlo(100),
}
PLAIN = "softmax of the mean"
POINTS = 1000
JUDGE_SAMPLES = 100_000


def batches(features: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(features.split(500), labels.split(500), strict=True))


def judge(posterior: mola.MoLA, features: Tensor) -> tuple[Tensor, float]:
    """Monte Carlo with very many samples, in two independent halves, and its own mean total variation error."""
    first, second = (
        posterior.with_link(mola.MonteCarlo(JUDGE_SAMPLES // 2, seed=seed))(features) for seed in (101, 202)
    )
    return (first + second) / 2, float(total_variation(first, second).mean()) / 2


def total_variation(first: Tensor, second: Tensor) -> Tensor:
    """Half the sum of absolute differences (n,): the largest disagreement on the probability of any set of classes."""
    return (first - second).abs().sum(1) / 2


def errors(probs: Tensor, truth: Tensor, labels: Tensor | None) -> dict[str, float]:
    distance = total_variation(probs, truth)
    found = {
        "mean_tv": float(distance.mean()),
        "max_tv": float(distance.max()),
        "confidence_error": metrics.mean_confidence(probs) - metrics.mean_confidence(truth),
        "same_class": float((probs.argmax(1) == truth.argmax(1)).double().mean()),
    }
    if labels is not None:
        nll = metrics.negative_log_likelihood
        found["nll_difference"] = nll(probs, labels) - nll(truth, labels)
    return found


@dataclass(frozen=True)
class Experiment:
    """A trained head, its training data, and the data it is judged on, all in float64."""

    head: nn.Linear
    train: list[tuple[Tensor, Tensor]]
    validation: list[tuple[Tensor, Tensor]]
    test: Tensor
    test_labels: Tensor
    svhn: Tensor

    @classmethod
    def on(cls, head: cifar10.HeadOnly, examples: dict[str, cifar10.Examples]) -> Self:
        """What one network's head sees."""
        features = {name: seen.inputs[:, head.index].double() for name, seen in examples.items()}
        return cls(
            head.linear.double(),
            batches(features["train"], examples["train"].labels),
            batches(features["validation"], examples["validation"].labels),
            features["test"],
            examples["test"].labels,
            features["SVHN"],
        )

    def fit(self, structure: str) -> mola.MoLA:
        """The posterior before tuning."""
        return mola.fit(self.head, self.train, structure=structure, progress=False)

    def tune(self, posterior: mola.MoLA, rule: Rule) -> mola.MoLA:
        """The posterior at the prior precision that the rule picks."""
        return posterior.tune(self.validation, rule=rule, progress=False)


def link_errors(experiment: Experiment, structure: str, fitted: mola.MoLA) -> Iterator[dict[str, Any]]:
    """How far each link is from the judge, at the prior precisions that the probit link's rules pick."""
    points = {
        "test": (experiment.test[:POINTS], experiment.test_labels[:POINTS]),
        "svhn": (experiment.svhn[:POINTS], None),
    }
    for rule_name, rule in RULES.items():
        posterior = experiment.tune(fitted, rule)
        for place, (inputs, labels) in points.items():
            truth, own_error = judge(posterior, inputs)
            probs = {PLAIN: mola.ensemble(experiment.head)(inputs)}
            probs |= {name: posterior.with_link(link)(inputs) for name, link in LINKS.items()}
            for name, values in probs.items():
                yield {
                    "structure": structure,
                    "rule": rule_name,
                    "prior_precision": posterior.prior_precision[0],
                    "data": place,
                    "link": name,
                    **errors(values, truth, labels),
                    "judge_confidence": metrics.mean_confidence(truth),
                    "judge_error": own_error,
                }


def cooled(experiment: Experiment) -> nn.Linear:
    """The head with its logits divided by the temperature that does best on the validation data."""
    features, labels = (torch.cat(parts) for parts in zip(*experiment.validation, strict=True))
    temperatures = torch.logspace(-1, 1, 401, dtype=torch.float64)
    with torch.no_grad():
        logits = experiment.head(features)
        losses = torch.stack([nn.functional.cross_entropy(logits / t, labels) for t in temperatures])
        copy = deepcopy(experiment.head)
        for parameter in copy.parameters():
            parameter /= temperatures[losses.argmin()]
    return copy


def scores(experiment: Experiment, structure: str, name: str, posterior: mola.MoLA) -> dict[str, Any]:
    """How well a posterior predicts on all test images, and tells them from SVHN by the largest probability."""
    inside, outside = posterior(experiment.test), posterior(experiment.svhn)
    return {
        "structure": structure,
        "link": name,
        "prior_precision": posterior.prior_precision[0] if name in LINKS else None,
        "nll": metrics.negative_log_likelihood(inside, experiment.test_labels),
        "ece": metrics.expected_calibration_error(inside, experiment.test_labels),
        "svhn_auroc": metrics.auroc(-inside.max(1).values, -outside.max(1).values),
    }


def baseline_scores(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """The network by itself, and at the temperature that its validation log-loss picks."""
    yield scores(experiment, "none", PLAIN, mola.ensemble(experiment.head))
    yield scores(experiment, "none", "temperature scaling", mola.ensemble(cooled(experiment)))


def tuned_scores(experiment: Experiment, structure: str, fitted: mola.MoLA) -> Iterator[dict[str, Any]]:
    """Each link at the prior precision that its own validation log-loss picks."""
    for name, link in LINKS.items():
        posterior = experiment.tune(fitted.with_link(link), RULES["validation NLL"])
        yield scores(experiment, structure, name, posterior)


def variances(experiment: Experiment, structure: str, fitted: mola.MoLA) -> dict[str, Any]:
    """Median variance of a logit on test and SVHN images, common to all classes and in their contrasts (probit link's NLL)."""
    posterior = experiment.tune(fitted, RULES["validation NLL"])
    row: dict[str, Any] = {"structure": structure, "prior_precision": posterior.prior_precision[0]}
    for place, inputs in (("test", experiment.test), ("svhn", experiment.svhn)):
        with torch.no_grad():
            moments = posterior.components[0].moments(inputs)
        row[f"common_{place}"] = float((moments.variance - moments.contrast_variance).mean(1).median())
        row[f"contrast_{place}"] = float(moments.contrast_variance.mean(1).median())
    return row


def error_table(rows: list[dict[str, Any]], rule: str) -> str:
    """One table for a rule: structures and links down, test and SVHN errors across, in percent but for the log-loss."""
    lines = [
        "| structure | link | test: TV mean | max | confidence | NLL | SVHN: TV mean | max | confidence |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    inside = {(row["structure"], row["link"]): row for row in rows if row["data"] == "test" and row["rule"] == rule}
    outside = {(row["structure"], row["link"]): row for row in rows if row["data"] == "svhn" and row["rule"] == rule}
    previous = None
    for key, test in inside.items():
        svhn = outside[key]
        name = "" if key[0] == previous else f"`{key[0]}`, λ = {test['prior_precision']:.2g}"
        previous = key[0]
        lines.append(
            f"| {name} | {key[1]} | {100 * test['mean_tv']:.2f} | {100 * test['max_tv']:.1f} "
            f"| {100 * test['confidence_error']:+.2f} | {test['nll_difference']:+.4f} "
            f"| {100 * svhn['mean_tv']:.2f} | {100 * svhn['max_tv']:.1f} | {100 * svhn['confidence_error']:+.2f} |"
        )
    return "\n".join(lines)


def score_table(rows: list[dict[str, Any]]) -> str:
    """Structures and links down, scores across."""
    lines = ["| structure | link | λ | test NLL | ECE % | SVHN AUROC % |", "|---|---|---|---|---|---|"]
    for row in rows:
        precision = "" if row["prior_precision"] is None else f"{row['prior_precision']:.2g}"
        lines.append(
            f"| {row['structure']} | {row['link']} | {precision} | {row['nll']:.4f} | {100 * row['ece']:.2f} "
            f"| {100 * row['svhn_auroc']:.2f} |"
        )
    return "\n".join(lines)


def variance_table(rows: list[dict[str, Any]]) -> str:
    """Structures down; common-mode and contrast variance across."""
    lines = ["| structure | λ | common mode: test | SVHN | contrasts: test | SVHN |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{row['structure']}` | {row['prior_precision']:.2g} | {row['common_test']:.2g} | {row['common_svhn']:.2g} "
        f"| {row['contrast_test']:.2g} | {row['contrast_svhn']:.2g} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder as in cifar10.py")
    parser.add_argument("--networks", type=Path, required=True, help="folder with 00.safetensors, ...")
    parser.add_argument("--cache", type=Path, help="keep the network's features in this folder")
    parser.add_argument("--network", type=int, default=0, help="which of the pretrained networks (default 0)")
    options = parser.parse_args()
    warnings.simplefilter("ignore", mola.MolaWarning)  # the grids grow, as they should
    heads, examples = cifar10.load(options.data, options.networks, count=options.network + 1, cache=options.cache)
    experiment = Experiment.on(heads[options.network], examples)
    rows, tuned, spreads = [], list(baseline_scores(experiment)), []
    for structure in STRUCTURES:
        fitted = experiment.fit(structure)
        spreads.append(variances(experiment, structure, fitted))
        tuned += tuned_scores(experiment, structure, fitted)
        rows += link_errors(experiment, structure, fitted)
    document = {"judge_samples": JUDGE_SAMPLES, "points": POINTS, "network": options.network}
    document |= {"environment": record.environment("mola-torch"), "rows": rows, "tuned": tuned, "variances": spreads}
    record.write("links_against_monte_carlo", document)
    for rule in RULES:
        print(f"\nErrors, prior precision by {rule}\n\n{error_table(rows, rule)}")
    print(f"\nThe judge's own mean TV error is at most {100 * max(row['judge_error'] for row in rows):.3f} %.")
    print(f"\nScores, prior precision by each link's own validation NLL\n\n{score_table(tuned)}")
    print(f"\nVariance of a logit, median over images\n\n{variance_table(spreads)}")


if __name__ == "__main__":
    main()
