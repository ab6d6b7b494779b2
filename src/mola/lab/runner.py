"""Predictions in, the numbers of a record out.

Run a suite: activations once, then every method of every run, each record written as soon as it is made.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mola
from mola import metrics
from mola.compare.record import CONFIDENCE_BINS, Examples, LabelledResult, OutlierResult, Record
from mola.compare.store import SUITE, Store
from mola.errors import MolaError, OptionError, StorageError, warn
from mola.lab.activations import Activations, Network, Progress, Seen
from mola.lab.contestants import Contestant, Context, Outputs
from mola.lab.plan import Plan, claim, describe
from mola.lab.suite import EXAMPLES, Source

__all__ = [
    "METRICS",
    "compare_scores",
    "environment",
    "evaluate_labelled",
    "evaluate_outliers",
    "examples_of",
    "run_suite",
]

METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": metrics.accuracy,
    "log_likelihood": metrics.log_likelihood,
    "nll": metrics.negative_log_likelihood,
    "brier": metrics.brier,
    "ece": metrics.expected_calibration_error,
    "ece100": lambda probs, labels: metrics.expected_calibration_error(probs, labels, bins=100),
    "ece_legacy": metrics.expected_calibration_error_legacy,
    "mce": metrics.maximum_calibration_error,
    "mce_legacy": metrics.maximum_calibration_error_legacy,
    "confidence": lambda probs, _: metrics.mean_confidence(probs),
    "aurc": lambda probs, labels: metrics.area_under_risk_coverage(1 - probs.max(1).values, probs.argmax(1) == labels),
}
"""Of labelled data, by name."""


def evaluate_labelled(probs: Tensor, labels: Tensor, level: float, *, detail: bool = True) -> LabelledResult:
    """Every metric of predictions of labelled data; one that is not defined there is left out.

    Args:
        probs: (n, C)
        labels: (n,)
        level: how far the data are shifted.
        detail: whether to keep what reliability diagrams and histograms are drawn from.

    Returns:
        The numbers.
    """
    values = {name: metric(probs, labels) for name, metric in METRICS.items()}
    return LabelledResult(
        level=level,
        count=len(labels),
        # The legacy errors count nothing where every prediction is sure.
        metrics={name: value for name, value in values.items() if not math.isnan(value)},
        reliability=metrics.bin_confidences(probs, labels).tolist() if detail else [],
        histogram=_histogram(probs) if detail else [],
    )


def evaluate_outliers(
    probs: Tensor, scores: Mapping[str, tuple[Tensor, Tensor]], *, detail: bool = True
) -> OutlierResult:
    """How sure a method is of outliers, and how well each score tells them from the test set.

    Args:
        probs: of the outliers.
        scores: by name: those of the test set and those of the outliers, higher for the more outlying.
        detail: whether to keep the histogram.

    Returns:
        The numbers.
    """
    return OutlierResult(
        count=len(probs),
        confidence=metrics.mean_confidence(probs),
        scores={name: compare_scores(inside, outside) for name, (inside, outside) in scores.items()},
        histogram=_histogram(probs) if detail else [],
    )


def compare_scores(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """AUROC, both areas under precision and recall, and the false positives at 95 % true positives."""
    return {
        "auroc": metrics.auroc(inside, outside),
        "aupr_in": metrics.aupr_in(inside, outside),
        "aupr_out": metrics.aupr_out(inside, outside),
        "fpr95": metrics.fpr_at_tpr(inside, outside),
    }


def examples_of(probs: Tensor) -> Examples:
    """Confidence and class of a few predictions."""
    confidence, label = probs.double().max(1)
    return Examples(confidence.tolist(), label.tolist())


def _histogram(probs: Tensor) -> list[int]:
    counts: list[float] = torch.histc(probs.double().max(1).values, CONFIDENCE_BINS, 0, 1).tolist()
    return [int(count) for count in counts]


PROTOCOL = 1
"""Raised by hand when records of before would come out otherwise: a change of fitting, links, tuning or metrics."""

FIRST_PART = 0.8
"""Share of the work that activations are, as measured on images."""


def run_suite(
    plan: Plan, activations: Activations, store: Store, progress: Progress, *, fresh: bool = False
) -> list[Record]:
    """Run every method that has no record yet, and return all the records.

    A method that refuses its task does not keep the others from theirs.

    Args:
        plan: what is to be run.
        activations: where the networks' activations are kept.
        store: where the records are kept.
        progress: told what is being done, and which share is done.
        fresh: whether to make all records anew, and forget those of another experiment.

    Returns:
        The records, those that were there already included.

    Raises:
        OptionError: at the end, if methods refused their task.
        StorageError: if a file is damaged, or the folder holds another experiment.
    """
    claim(plan, store, fresh=fresh)
    store.write_document(plan.suite.name, SUITE, describe(plan))
    needed = plan.networks[: max(plan.runs_of(group) * len(plan.members(group, 0)) for group in plan.groups)]
    activations.compute(needed, list(plan.sources.values()), lambda doing, done: progress(doing, FIRST_PART * done))
    work = [
        (group, run, method)
        for group in plan.groups
        for run in range(plan.runs_of(group))
        for method in plan.methods(group)
    ]
    memory, workshop = _Memory(activations, plan.sources), plan.workshop(activations)
    records, refused = [], []
    for index, (group, run, method) in enumerate(work):
        doing = f"run {run + 1}: {method.name}"
        progress(doing, FIRST_PART + (1 - FIRST_PART) * index / len(work))
        networks = tuple(plan.members(group, run))
        used = networks if method.components is None else networks[: method.components]
        settings = {"components": len(used), "threshold": plan.suite.threshold, **method.settings()}
        settings |= {"network": plan.network, "protocol": PROTOCOL, "metrics": list(METRICS)}
        identity = (settings, [network.checksum for network in used], _checksums(plan))
        known = None if fresh else _known(store, plan.suite.name, method.name, run)
        if known is not None and (known.settings, known.networks, known.data) == identity:
            progress(f"{doing} (there already)", FIRST_PART + (1 - FIRST_PART) * index / len(work))
            records.append(known)
            continue
        context = Context(partial(memory.read, networks), plan.suite.threshold, networks, run, workshop)
        try:
            records.append(_run(plan, method, run, context, identity))
        except StorageError:
            raise  # a damaged file is everybody's
        except MolaError as error:
            refused.append(f"{method.name}, run {run + 1}: {error}")
            continue
        store.write(records[-1])
    progress("records are ready", 1.0)
    if refused:
        message = "some methods could not be run; the others' records are kept.\n  " + "\n  ".join(refused)
        raise OptionError(message)
    return records


def _known(store: Store, suite: str, method: str, run: int) -> Record | None:
    """A record that is there; one that cannot be read is made again, and said so."""
    try:
        return store.read(suite, method, run)
    except StorageError as error:
        warn(f"{error} It is made again.")
        return None


class _Memory:
    """Activations that were read last, as many as fit into a share of memory."""

    LARGEST = 4 * 2**30

    def __init__(self, activations: Activations, sources: Mapping[str, Source]) -> None:
        self.activations, self.sources = activations, sources
        self.kept: dict[tuple[tuple[Network, ...], str], Seen] = {}

    def read(self, networks: tuple[Network, ...], name: str) -> Seen:
        """What these networks make of a set."""
        key = (networks, name)
        if key in self.kept:
            self.kept[key] = self.kept.pop(key)  # the last to go
            return self.kept[key]
        seen = self.activations.read(networks, self.sources[name])
        while self.kept and sum(one.bytes for one in self.kept.values()) + seen.bytes > self.LARGEST:
            self.kept.pop(next(iter(self.kept)))
        self.kept[key] = seen
        return seen


def _run(
    plan: Plan,
    method: Contestant,
    run: int,
    context: Context,
    identity: tuple[dict[str, Any], list[str], dict[str, str]],
) -> Record:
    fitted = method.fit(context)
    seconds = 0.0

    def predict(name: str, scores: bool) -> Outputs:
        nonlocal seconds
        context.read(name)  # from disk, before the clock starts
        start = time.perf_counter()
        outputs = fitted.predict(name, scores)
        seconds += time.perf_counter() - start
        return outputs

    labelled, outliers, examples = {}, {}, {}
    inside = predict("test", any(source.role == "outlier" for source in plan.sources.values()))
    detail = method.group == "main"  # figures show no more than these
    for source in plan.sources.values():
        if source.role in ("train", "validation"):
            continue
        outputs = inside if source.role == "test" else predict(source.name, source.role == "outlier")
        if source.role == "outlier":
            pairs = {name: (inside.scores[name], scores) for name, scores in outputs.scores.items()}
            outliers[source.name] = evaluate_outliers(outputs.probs, pairs, detail=detail)
        else:
            labels = context.read(source.name).labels
            labelled[source.name] = evaluate_labelled(outputs.probs, labels, source.level, detail=detail)
        if detail:
            examples[source.name] = examples_of(outputs.probs[:EXAMPLES])
    settings, networks, data = identity
    return Record(
        suite=plan.suite.name,
        method=method.name,
        group=method.group,
        run=run,
        settings=settings,
        networks=networks,
        data=data,
        chosen=_finite(fitted.chosen),
        seconds={"fit": fitted.seconds, "predict": seconds},
        labelled=labelled,
        outliers=outliers,
        examples=examples,
        environment=environment(),
    )


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checksums(plan: Plan) -> dict[str, str]:
    return {name: source.checksum for name, source in plan.sources.items()}


def environment() -> dict[str, Any]:
    """Versions that the numbers were made with."""
    return {
        "mola": mola.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
