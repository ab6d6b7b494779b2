"""What SWAG and MIMO share of training: derived seeds, BatchNorm statistics, and the choice of a learning rate.

The learning rate is chosen by the confidence that it leaves on validation data: the paper's rule for lambda, for SWAG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mola.errors import DataError, OptionError, warn
from mola.likelihood import CATEGORICAL
from mola.metrics import accuracy, brier, mean_confidence
from mola.mixture import Mixture
from mola.network import as_batch, call, peek
from mola.numerics import check_seed
from mola.options import is_real
from mola.saving.training_checkpoint import DivergedError
from mola.tuning.rules import ConfidenceThreshold


def derived_seeds(seed: int, purpose: int, count: int) -> list[int]:
    """`count` seeds of one purpose.

    Args:
        seed: the user's.
        purpose: a small number; different purposes share no seed but by chance.
        count: how many.

    Returns:
        Seeds.
    """
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    own = int(torch.randint(2**62, (purpose + 1,), generator=generator)[-1])
    return torch.randint(2**62, (count,), generator=generator.manual_seed(own)).tolist()


@contextmanager
def seeded(network: nn.Module, seed: int) -> Iterator[None]:
    """A place with a random state of its own, which begins at a seed; outside, nothing changes.

    Args:
        network: on whose devices things are drawn.
        seed: of the CPU and of those devices.

    Yields:
        Nothing.
    """
    devices = {tensor.device for tensor in network.parameters()}
    cards = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=cards):
        # One by one: torch.manual_seed would seed every device of the machine, also those whose state is not put back.
        torch.default_generator.manual_seed(seed)
        for card in cards:
            with torch.cuda.device(card):
                torch.cuda.manual_seed(seed)
        if any(device.type == "mps" for device in devices):
            torch.mps.manual_seed(seed)
        yield


def _normalisations(network: nn.Module) -> dict[str, _NormBase]:
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def has_statistics(network: nn.Module) -> bool:
    """Whether a network keeps running statistics of its activations."""
    return bool(_normalisations(network))


def recompute_statistics(network: nn.Module, loader: Iterable[Any]) -> dict[str, Tensor]:
    """Reset the running statistics, run over the data in train mode, and average: batch i of size b counts b.

    The network is changed: pass one of your own. Dropout stays active during the pass, as in training.

    Args:
        network: with the weights whose statistics are wanted.
        loader: training data; labels are not read.

    Returns:
        The running means and variances by name of the buffer, as copies.
    """
    norms = _normalisations(network)
    momenta = {name: module.momentum for name, module in norms.items()}
    seen = 0
    network.train()
    try:
        for module in norms.values():
            module.reset_running_stats()
        for index, raw in enumerate(peek(loader, "the training loader")[1]):
            inputs = as_batch(raw, f"batch {index} of the training loader").inputs
            size = _rows(inputs)
            for module in norms.values():
                module.momentum = size / (seen + size)
            call(network, inputs)
            seen += size
    finally:
        for name, module in norms.items():
            module.momentum = momenta[name]
        network.eval()
    buffers = dict(network.named_buffers())
    names = [f"{name}.{kind}" if name else kind for name in norms for kind in ("running_mean", "running_var")]
    return {name: buffers[name].detach().clone() for name in names}


def _rows(inputs: Any) -> int:
    # Size of a batch: that of its first tensor.
    if isinstance(inputs, Tensor):
        return len(inputs)
    return _rows(next(iter(inputs.values() if hasattr(inputs, "values") else inputs)))


Made = TypeVar("Made", bound=Mixture)


@dataclass(frozen=True)
class LearningRateTuning:
    """How a learning rate was chosen."""

    rule: str
    learning_rate: float
    curve: dict[str, tuple[float, ...]]
    """What each candidate scored, in the order they were tried: "learning_rate", "confidence", "accuracy", "brier"."""
    notes: tuple[str, ...] = ()
    """What the user should know: rates that diverged, a threshold that nothing met."""

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        curve = {name: list(values) for name, values in self.curve.items()}
        return {"rule": self.rule, "learning_rate": self.learning_rate, "curve": curve, "notes": list(self.notes)}

    @staticmethod
    def from_json(entry: dict[str, Any]) -> LearningRateTuning:
        """What `as_json` made."""
        curve = {name: tuple(values) for name, values in entry["curve"].items()}
        return LearningRateTuning(entry["rule"], entry["learning_rate"], curve, tuple(entry["notes"]))


@dataclass(frozen=True)
class Chosen(Generic[Made]):
    """The predictor at the chosen rate, and how it was chosen."""

    predictor: Made
    tuning: LearningRateTuning


def as_rates(given: Any) -> tuple[list[float], bool]:
    """Learning rates as the user gave them.

    Args:
        given: one number, or several.

    Returns:
        All of them, and whether there were several to choose from.
    """
    if getattr(given, "ndim", None) == 0:  # of numpy or torch
        given = given.item()
    several = isinstance(given, Iterable) and not isinstance(given, str)
    values = [one.item() if getattr(one, "ndim", None) == 0 else one for one in (given if several else [given])]
    if not all(map(is_real, values)):
        raise OptionError(f"learning_rate must be a finite number above 0, or several to choose from; got {given!r}.")
    return [*map(float, values)], several


def score(predictor: Mixture, loader: Iterable[Any], *, labelled: bool) -> dict[str, float]:
    """Mean confidence and, where there are labels, accuracy and Brier score on a loader.

    Args:
        predictor: to score.
        loader: read once.
        labelled: whether there must be labels.

    Returns:
        Scores by name.
    """
    probs, labels = [], []
    for index, raw in enumerate(peek(loader, "the validation loader")[1]):
        place = f"batch {index} of the validation loader"
        batch = as_batch(raw, place)
        probs.append(predictor(batch.inputs).cpu())
        if batch.labels is not None:
            labels.append(CATEGORICAL.check_labels(batch.labels, probs[-1], place))
        elif labelled:
            raise DataError(
                f"{place} has no labels, which the threshold needs. Yield (inputs, labels), or pass a confidence."
            )
    joined = torch.cat(probs)
    scores = {"confidence": mean_confidence(joined)}
    if labels:
        known = torch.cat(labels)
        scores |= {"accuracy": accuracy(joined, known), "brier": brier(joined, known)}
    return scores


def choose_learning_rate(
    rates: Sequence[float],
    make: Callable[[float], Made],
    plain: Sequence[Mixture],
    val_loader: Iterable[Any] | None,
    rule: ConfidenceThreshold | None,
) -> Chosen[Made]:
    """The largest learning rate whose predictor meets the threshold on validation data.

    A larger rate spreads the weights more, as a smaller lambda does: the paper's rule, the smallest lambda that meets
    the threshold, is here the largest rate. Rates are tried from the largest down, and the first that meets it ends
    the search.

    Args:
        rates: candidates.
        make: the predictor at a rate; raises `DivergedError` where there is none.
        plain: the trained networks by themselves, whose accuracy sets the default threshold.
        val_loader: validation data, read once for each rate tried.
        rule: the threshold; None is the paper's.

    Returns:
        The predictor and the record.
    """
    rule = rule or ConfidenceThreshold()
    _check(rates, val_loader, rule)
    assert val_loader is not None
    labelled = rule.confidence is None or rule.brier is not None
    accuracy = None
    if rule.confidence is None:
        accuracy = sum(score(one, val_loader, labelled=True)["accuracy"] for one in plain) / len(plain)
    threshold = rule.confidence if accuracy is None else accuracy - rule.margin
    assert threshold is not None
    record: list[tuple[float, dict[str, float]]] = []
    notes: list[str] = []
    best: tuple[float, float, Made] | None = None
    for rate in sorted(rates, reverse=True):
        try:
            made = make(rate)
        except DivergedError as error:
            notes.append(str(error))
            continue
        scores = score(made, val_loader, labelled=labelled)
        record.append((rate, scores))
        if scores["confidence"] >= threshold and (rule.brier is None or scores["brier"] <= rule.brier):
            best = (scores["confidence"], rate, made)
            break
        if best is None or scores["confidence"] > best[0]:
            best = (scores["confidence"], rate, made)
    else:
        if best is None:
            raise DivergedError(f"SWAG diverged at every learning rate of {sorted(rates)}. {notes[-1]}")
        notes.append(
            f"no learning rate of {sorted(rates)} meets the threshold, a mean confidence of at least {threshold:.4f}, on "
            f"the validation data; took {best[1]:g}, the most confident with {best[0]:.4f}. Try smaller rates."
        )
    for note in notes:
        warn(note)
    curve = {"learning_rate": tuple(rate for rate, _ in record)}
    curve |= {name: tuple(scores[name] for _, scores in record) for name in record[0][1]}
    return Chosen(best[2], LearningRateTuning(rule.words(accuracy), best[1], curve, tuple(notes)))


def _check(rates: Sequence[float], val_loader: Iterable[Any] | None, rule: ConfidenceThreshold) -> None:
    if not rates:
        raise OptionError("learning_rate: expected a number, or at least one of them to choose from; got none.")
    if val_loader is None:
        raise OptionError(f"choosing among the learning rates {list(rates)} needs validation data: pass val_loader.")
    if rule.grid is not None:
        raise OptionError(
            "rule: a grid of prior precisions says nothing about learning rates; pass the rates as learning_rate=[...]."
        )
