"""What candidates for the prior precision score on held-out data, with one pass of the networks over it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.cooling import Cooling, Usual
from mola.distributed import Team
from mola.errors import DataError, warn
from mola.laplace import Candidate, ClassDistance, ClassGeometry, LogitMoments, Posterior, Scale, Spectrum, Spread
from mola.likelihood import CATEGORICAL, Likelihood
from mola.links import Link, cooled_table
from mola.metrics import bin_index
from mola.network import Head, Lifted, batch_count, batches_of, stream, without_autocast
from mola.tuning.data_checks import guessed, other_columns, other_order, unlike_frequencies

LOGITS_AT_ONCE = 2**18
"""Probabilities, of one or several candidates, made together: more leave the processor's cache, and take several times as long."""

ROWS_AT_ONCE = 2048
"""Data of which numbers for each feature are made together: of more, they leave the cache."""

WEIGHTS_AT_ONCE = 2**21
"""Of the last layer, for candidates that are tried together: there may be few data, and very many weights."""

PROJECTED_AT_ONCE = 2**24
"""Projected numbers of all components held at once when candidates are compared; the data are taken in portions."""

FEW_NUMBERS = 2**23
"""What was made of the data is kept from one round of candidates to the next if it is no more than this: 64 MB of each kind."""

Made = TypeVar("Made")

Tried = tuple[slice, slice | Tensor, Tensor]
"""Some candidates, some rows of the data, and probabilities (L, A, m) under these: of A answers to m questions. L is 1 where they are
the same under all of the candidates."""

GATHERED = 2**20
"""Features, or logits, of small batches that are checked, and brought to main memory, together."""

LONG = 0.99
"""Share of the validation data whose features are not long."""

BINS = 15
"""Of the calibration error."""

COPIES = 0.1
"""Least distance that counts as usual, relative to that of the training data: below, validation data are copies of these."""

NOT_HELD_OUT = "the validation data are the training data"
"""How a note begins that says so."""

SAME = 1e-5
"""Relative difference of two sums of log-likelihoods up to which they are of the same data: rounding depends on the batches."""

LOSS_OF_AN_ERROR = 5.0
"""In nats, of a datum that a trained network gets wrong: a mean loss is made of a few such, and of very many small ones."""

POSITIONS_KEPT = 256
"""Of each input, where a network has outputs at many positions: at most so many are kept, drawn at random. Memory is then that of so
many data for each input, however large the images are; more would tell little, as neighbours are alike."""

PATIENCE = 60.0
"""Seconds that candidates may take before it is said how long they will."""


@dataclass(frozen=True)
class HeldOut:
    """What K networks make of data that were held out: features with the constant 1, logits, and labels."""

    features: Sequence[Tensor]
    logits: Sequence[Tensor]
    labels: Tensor | None
    team: Team = field(default_factory=Team.alone, repr=False, kw_only=True)
    """Whose data these are: each process holds its own shard, and what is said of the data is said of all of them."""
    likelihood: Likelihood = field(default=CATEGORICAL, repr=False, kw_only=True)
    """What the logits mean, and how labels are read."""
    independent: float = field(default=1.0, repr=False, kw_only=True)
    """Share of the data that count in a standard error: of positions, as many as there are inputs, whose positions are alike."""
    _measured: dict[int, tuple[ClassGeometry, Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _accuracy: list[tuple[float, float]] = field(default_factory=list, init=False, repr=False, compare=False)
    _answers: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.logits[0])

    def portions(self, rows: int) -> Iterator[tuple[slice, list[Tensor], list[Tensor]]]:
        """At most so many rows at a time: which ones, and every network's features and logits of them in float64."""
        for start in range(0, len(self), rows):
            part = slice(start, start + rows)
            yield part, [some[part].double() for some in self.features], [some[part].double() for some in self.logits]

    def measured(self, geometries: Sequence[ClassGeometry]) -> tuple[Tensor, Tensor]:
        """Logarithms of distances and lengths of the features (K, n), measured once.

        Args:
            geometries: the training classes as each network sees them.

        Returns:
            In float64.
        """
        for geometry, features in zip(geometries, self.features, strict=True):
            if id(geometry) not in self._measured:
                widest = max(features.shape[1], len(geometry.sums.counts))
                distance, rows = ClassDistance(geometry), max(1, min(ROWS_AT_ONCE, PROJECTED_AT_ONCE // widest))
                parts = [distance.logs(some.double()) for some in torch.split(features, rows)]
                self._measured[id(geometry)] = (
                    geometry,
                    torch.cat([one for one, _ in parts]),
                    torch.cat([two for _, two in parts]),
                )
        found = [self._measured[id(geometry)] for geometry in geometries]
        return torch.stack([one for _, one, _ in found]), torch.stack([two for _, _, two in found])

    def usual(self, geometries: Sequence[ClassGeometry]) -> Usual:
        """What is usual of these data: the median of the distances, and a length that 99 % stay below, for each network.

        Args:
            geometries: the training classes as each network sees them.

        Returns:
            The same on every process of a team.
        """
        distances, lengths = self.measured(geometries)
        rows = self.team.rows(torch.cat([distances, lengths]).T.contiguous() if len(self) else None)
        # Where most data are copies of one of the training data, the median is rounding, and no unit for the others.
        middle = [
            max(here, COPIES * geometry.training_scale.distance)
            for here, geometry in zip(
                rows[:, : len(geometries)].quantile(0.5, dim=0).exp().tolist(), geometries, strict=True
            )
        ]
        long = rows[:, len(geometries) :].quantile(LONG, dim=0).exp().tolist()
        scales = [Scale(one, two) for one, two in zip(middle, long, strict=True)]
        return Usual(tuple(Scale(*scale) for scale in self.team.share([list(scale) for scale in scales])))

    def _answered(self) -> list[Tensor]:
        # What each network says, found once: which logit is largest takes long to find.
        if not self._answers:
            self._answers.extend(self.likelihood.answered(logits) for logits in self.logits)
        return self._answers

    def mean_accuracy(self) -> tuple[float, float]:
        """Accuracy of the trained networks by themselves, averaged over them.

        Returns:
            Between 0 and 1, and its standard error over the data, which the networks share.
        """
        if self.labels is None:
            raise DataError("the threshold rule needs labels: yield (inputs, labels), or pass a confidence.")
        if self._accuracy:  # rules ask more than once; in a team all ranks have it, or none
            return self._accuracy[0]
        asked = self.likelihood.asked(self.labels)
        known = asked >= 0
        right = torch.stack([(answers == asked) & known for answers in self._answered()]).double()
        # By datum: the questions of one are not independent, and its errors come together.
        of_each, asked_of = _by_datum(right.mean(0), len(self)), _by_datum(known.double(), len(self))
        squares = [of_each.square().sum(), (of_each * asked_of).sum(), asked_of.square().sum()]
        (sums,) = self.team.sum([torch.cat([torch.stack([asked_of.sum(), *squares]), right.sum(1)])])
        count, square, product, square_asked, *by_network = sums.tolist()
        accuracy = sum(one / count for one in by_network) / len(by_network)
        spread = max(0.0, square - 2 * accuracy * product + accuracy**2 * square_asked) / self.independent
        # At least 1 / (count + 2): where all are right, or all wrong, the spread is 0, and a few data are still a few.
        self._accuracy.append((accuracy, max(math.sqrt(spread) / count, 1 / (self.independent * count + 2))))
        return self._accuracy[0]

    def check_labels(self, where: str) -> None:
        """Refuse labels whose classes are in another order than a network's outputs; warn of labels that fit no better than guesses.

        Args:
            where: what the data are called.
        """
        if self.labels is None or not self.likelihood.discrete:
            return
        asked = self.likelihood.asked(self.labels)
        table = torch.stack([asked, *self._answered()], 1)
        rows = self.team.rows(table[asked >= 0] if len(self) else None)
        if not len(rows):
            raise DataError(f"the {where}: every label is missing. Yield some labels.")
        if not self.likelihood.competing:
            self._check_labels_apart(where)
        count, outputs, right = len(rows), self.likelihood.answers(self.logits[0].shape[1]), []
        for index in range(len(self.logits)):
            pairs = rows[:, [0, index + 1]]
            right.append(float((pairs[:, 0] == pairs[:, 1]).double().mean()))
            found = other_order(pairs)
            if found is not None:
                pairs_of = ", ".join(f"{label} -> {output}" for label, output in list(found.outputs.items())[:20])
                raise DataError(
                    f"the {where}: the classes seem to be in another order than the outputs of models[{index}]. {found.right:.1%} of "
                    f"the labels agree with this network, but {found.moved:.1%} would if labels stood for outputs like this: "
                    f"{pairs_of}{', ...' if len(found.outputs) > 20 else ''}. Give each input the index of its class's output as its "
                    f"label."
                )
        mean = sum(right) / len(right)
        if guessed(mean, round(count * self.independent), outputs):
            warn(
                f"only {mean:.1%} of the labels of the {where} agree with {'the network' if len(right) == 1 else 'the networks'}, "
                f"hardly more than guessing ({1 / outputs:.1%}): are the labels those of these inputs, and are the inputs prepared as "
                f"for training?"
            )

    def _check_labels_apart(self, where: str) -> None:
        # Look at each label by itself: whether they are those of other outputs, and whether yes is said as often as it
        # is right.
        assert self.labels is not None
        mean = torch.stack([self.likelihood.probabilities(logits.double()) for logits in self.logits]).mean(0)
        rows = self.team.rows(torch.cat([self.labels.double(), mean], 1) if len(self) else None)
        labels, said = rows.tensor_split(2, dim=1)
        order = other_columns(labels, said)
        if order is not None:
            raise DataError(
                f"the {where}: the labels seem to be in another order than the networks' outputs: column by column, the labels go "
                f"with outputs {order[:20]}{'...' if len(order) > 20 else ''}. Put the columns in the order of the outputs."
            )
        words = unlike_frequencies(labels, said)
        if words is not None:
            warn(f"the {where}: {words}")

    def guessed(self) -> bool:
        """Whether the labels agree with the networks hardly more often than guesses: then they say nothing of confidence."""
        if self.labels is None:
            return False
        known = self.independent * (self.likelihood.asked(self.labels) >= 0).sum()
        (count,) = self.team.sum([known.double().cpu()])
        return guessed(self.mean_accuracy()[0], int(count), self.likelihood.answers(self.logits[0].shape[1]))

    def unlike_held_out(self, trained_on: Sequence[tuple[int, float | None]]) -> str | None:
        """What makes one doubt that these data were held out.

        Args:
            trained_on: for each network, the number of training data, and the sum of their log-likelihoods, if it is known.

        Returns:
            Words for the user; None if nothing speaks against it.
        """
        if self.labels is None or any(score is None for _, score in trained_on):
            return None
        own = [self.likelihood.log_likelihood(logits.double(), self.labels).sum() for logits in self.logits]
        here = torch.tensor([len(self)], dtype=torch.float64, device="cpu")
        (sums,) = self.team.sum([torch.cat([here, torch.stack(own).cpu()])])
        count, *scores = sums.tolist()
        pairs = [(size, -(score or 0.0), -mine) for (size, score), mine in zip(trained_on, scores, strict=True)]
        if all(
            size == count and trained > 0 and abs(trained - mine) <= SAME * trained for size, trained, mine in pairs
        ):
            return (
                f"{NOT_HELD_OUT}: as many, with the same log loss to five digits. Networks look surer and "
                "better on these than they are. Pass data that they were not trained on."
            )
        before = sum(trained / size for size, trained, _ in pairs) / len(pairs)
        now = sum(mine / count for _, _, mine in pairs) / len(pairs)
        # As many errors as the training loss lets one expect, and none of them here: chance explains it once in a thousand times.
        if now < before / 2 and self.independent * count * (before - now) > 7 * LOSS_OF_AN_ERROR:
            return (
                f"the networks do far better on the validation data (log loss {now:.3g}) than on the training data ({before:.3g}): "
                f"have the two been swapped, or were the networks trained on the validation data? Training data that are augmented, "
                f"or labelled less carefully, look like this, too."
            )
        return None


def read_held_out(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | None],
    loader: Iterable[Any],
    *,
    where: str,
    labelled: bool,
    progress: bool,
    team: Team | None = None,
    likelihood: Likelihood = CATEGORICAL,
) -> HeldOut:
    """Run every network once over a loader, and keep what the heads saw, in main memory.

    Call it inside `undisturbed(*networks)`.

    Args:
        networks: the trained classifiers.
        heads: their last linear layers; None where only the logits are wanted.
        loader: any iterable of batches.
        where: what the loader is for.
        labelled: whether every batch must carry labels.
        progress: whether to show a progress bar on stderr, if that is a terminal.
        team: the processes whose shards make up the data; then call it inside `team.work(...)`.
        likelihood: what the outputs mean; reads the labels.

    Returns:
        Features, logits and labels of all the data that the loader yields; of outputs at many positions, of `POSITIONS_KEPT` of each
        input.
    """
    together = Team.alone() if team is None else team
    inputs = 0

    def told(_: int, used_inputs: int, __: int) -> None:
        nonlocal inputs
        inputs += used_inputs

    widest = max((max(head.width, head.classes) for head in heads if head is not None), default=GATHERED)
    batches: Any = loader
    if together.size > 1:  # a shard may be empty, as long as another is not
        every = batches_of(loader, f"the {where}")
        first = next(every, None)

        def looked(batch: Any) -> Any:
            together.check()  # at every batch: many small ones come together below
            return batch

        batches = None if first is None else map(looked, chain([first], every))
    features: list[list[Tensor]] = [[] for _ in heads]
    logits: list[list[Tensor]] = [[] for _ in heads]
    labels: list[Tensor] = []
    for seen, batch_labels in (
        ()
        if batches is None and together.size > 1
        else stream(
            networks,
            heads,
            batches,
            where=where,
            progress=progress,
            total=batch_count(loader),
            labelled=labelled,
            likelihood=likelihood,
            rows=max(1, GATHERED // widest),
            exact=False,
            told=told,
            positions=POSITIONS_KEPT,
        )
    ):
        for index, (head, one) in enumerate(zip(heads, seen, strict=True)):
            # Copies, in any case: a loader, or a network, may use its memory again for the next batch.
            kept = one.features if head is None or isinstance(one, Lifted) else head.lift(one.features)
            features[index].append(_copy(kept))
            logits[index].append(_copy(one.logits))
        if batch_labels is not None:
            labels.append(_copy(batch_labels))
    if together.size > 1:
        _settle(together, where, heads, features, logits, labels)
    with without_autocast(torch.device("cpu")):  # which refuses to join tensors of another half precision than its own
        joined = [torch.cat(parts) for parts in features], [torch.cat(parts) for parts in logits]
    own = torch.tensor([inputs, len(joined[1][0])], dtype=torch.float64, device="cpu")
    (counts,) = together.sum([own])
    return HeldOut(
        *joined,
        torch.cat(labels) if labels else None,
        team=together,
        likelihood=likelihood,
        independent=float(counts[0] / counts[1]),
    )


def _copy(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu").copy_(values)


def _settle(
    team: Team,
    where: str,
    heads: Sequence[Head | None],
    features: list[list[Tensor]],
    logits: list[list[Tensor]],
    labels: list[Tensor],
) -> None:
    own = None
    if logits[0]:
        kind = [list(labels[0].shape[1:]), str(labels[0].dtype).removeprefix("torch.")] if labels else None
        own = {"classes": logits[0][0].shape[1], "labels": kind}
    everyone = team.collect(own)
    form = None
    if everyone is not None:
        forms = {rank: one for rank, one in enumerate(everyone) if one is not None}
        form = next(iter(forms.values()), None)
        if form is None:
            raise DataError(f"the {where} is empty on every rank: it yielded no batch.")
        other = next((rank for rank, one in forms.items() if one != form), None)
        if other is not None:
            raise DataError(
                f"the {where}: rank {next(iter(forms))} has {form}, rank {other} {forms[other]}. Pass shards of the same data."
            )
    form = team.share(form)
    if logits[0]:
        return
    for index, head in enumerate(heads):
        features[index].append(torch.zeros(0, 0 if head is None else head.width, device="cpu"))
        logits[index].append(torch.zeros(0, form["classes"], device="cpu"))
    if form["labels"] is not None:
        shape, dtype = form["labels"]
        labels.append(torch.zeros(0, *shape, dtype=getattr(torch, dtype), device="cpu"))


@dataclass(frozen=True)
class Tuning:
    """How a prior precision was chosen."""

    rule: str
    prior_precision: tuple[float, ...]
    """One for each component."""
    curve: dict[str, tuple[float, ...]] = field(default_factory=dict, repr=False)
    """What each candidate scored: "prior_precision", and figures on the held-out data."""
    notes: tuple[str, ...] = ()
    """What the user should know: a grid that grew, a threshold that nothing met."""
    temperature: float = 1.0
    """What all logits are divided by."""
    distance_exponent: float = 0.0
    """How strongly they are cooled by distance."""
    noise_factors: tuple[float, ...] = ()
    """What the noise of each component was multiplied by, where outputs are numbers and their noise was chosen."""

    def __str__(self) -> str:
        # What was chosen and by which rule, with the notes; the curve is for programs and figures.
        chosen = ", ".join(f"{value:.3g}" for value in dict.fromkeys(self.prior_precision))
        also = f", temperature {self.temperature:.3g}" if self.temperature != 1 else ""
        also += f", distance exponent {self.distance_exponent:.3g}" if self.distance_exponent else ""
        factors = ", ".join(f"{value:.3g}" for value in dict.fromkeys(self.noise_factors))
        also += f", noise times {factors}" if factors else ""
        return "\n".join([f"prior precision {chosen}{also}, by {self.rule}", *self.notes])

    def as_json(self) -> dict[str, Any]:
        """All but the prior precisions, as JSON."""
        return {
            "rule": self.rule,
            "curve": {name: list(values) for name, values in self.curve.items()},
            "notes": [*self.notes],
            "temperature": self.temperature,
            "distance_exponent": self.distance_exponent,
            **({"noise_factors": list(self.noise_factors)} if self.noise_factors else {}),
        }

    @staticmethod
    def from_json(entry: dict[str, Any], prior_precision: tuple[float, ...]) -> Tuning:
        """What `as_json` made, with the prior precisions."""
        curve = {name: tuple(values) for name, values in entry["curve"].items()}
        cooling = float(entry.get("temperature", 1.0)), float(entry.get("distance_exponent", 0.0))
        factors = tuple(float(one) for one in entry.get("noise_factors", ()))
        return Tuning(entry["rule"], prior_precision, curve, tuple(entry["notes"]), *cooling, factors)


class Named(Protocol):
    """Anything with a name."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    """A mixture whose prior precision is to be chosen: what every rule asks of it."""

    spectra: Sequence[object]
    """The curvature of each component in its eigenbasis."""
    link: Named
    """From logits to probabilities."""
    weights_at: Callable[[float | Sequence[float]], Tensor]
    """Mixture weights (K,) at a prior precision, or at one for each component."""
    read: Callable[[Iterable[Any], str, bool], HeldOut]
    """Run the networks once over a loader: (loader, what it is for, whether labels are required)."""
    log_evidence: Callable[[int, Tensor], Tensor]
    """Log evidence of a component at a prior precision; differentiable."""
    progress: bool = False
    """Whether to show a progress bar where candidates take long."""
    usual: Sequence[Usual] = ()
    """What is usual on the validation data, once they are read; nothing where distances are not known."""
    lacks_distances: str | None = None
    """Why distances are not known, for the user; None where they are."""
    likelihood: Likelihood = CATEGORICAL
    """What the logits mean."""

    @property
    def can_be_cooled(self) -> bool:
        """Whether temperatures and distance exponents can be tried."""
        return False

    @property
    def has_noise(self) -> bool:
        """Whether outputs are numbers with a noise, as in `tuning/regression.py`."""
        return False

    def curve(self, data: HeldOut, precisions: Sequence[float], *, only: str | None = None) -> dict[str, Tensor]:
        """What each candidate scores on held-out data.

        Args:
            data: features, logits and, for scores that need them, labels.
            precisions: the candidates.
            only: the one score that is asked for, of data with labels; None is all of them.

        Returns:
            One value for each candidate of "confidence" and, with labels, "nll", "brier" and "ece"; without, "uniform", the
            cross-entropy to the uniform distribution. Of these, `only` the one that is asked for.
        """
        return self._scored(data, len(precisions), self._tried(data, precisions), only)

    def _scored(self, data: HeldOut, tries: int, tried: Iterable[Tried], only: str | None = None) -> dict[str, Tensor]:
        scores = _Scores(tries, only)
        for which, part, probs in tried:
            scores.add(which, probs, None if data.labels is None else self.likelihood.asked(data.labels[part]))
        sums, bins, count = data.team.sum([scores.sums, scores.bins, scores.counts])
        means = sums / count[:, None]
        if data.labels is None:
            return {"confidence": means[:, 0], "uniform": means[:, 1]}
        gaps = bins.abs().sum(1) / count
        scored = {"confidence": means[:, 0], "nll": means[:, 1], "brier": means[:, 2], "ece": gaps}
        return scored if only is None else {only: scored[only]}

    @abstractmethod
    def _tried(self, data: HeldOut, precisions: Sequence[float]) -> Iterator[Tried]: ...


class _Group(NamedTuple):
    rows: slice | Tensor
    """Of all data."""
    means: Sequence[Tensor]
    """Logits (C, m) of each network, data last."""
    variances: Sequence[Tensor]
    """Of them (C, m), as the link asks for them."""
    logs: tuple[Tensor, Tensor] | None
    """Logarithms of distances and lengths (K, m); None where these do not matter."""


@dataclass(frozen=True, kw_only=True)
class LastLayerProblem(Problem):
    """A mixture over last layers: held-out features are projected on the eigenbases of the curvature once."""

    spectra: Sequence[Spectrum]
    link: Link
    geometries: Sequence[ClassGeometry] | None = None
    _kept: dict[str, tuple[HeldOut, object, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was made of few data last, by its name, with the data and the prior precisions: a search comes back to them."""

    def _once(self, name: str, data: HeldOut, at: object, numbers: int, make: Callable[[], Made]) -> Made:
        # What `make` makes of held-out data at prior precisions; if it is few numbers, kept until it is asked for
        # others.
        if numbers > FEW_NUMBERS:
            return make()
        found = self._kept.get(name)
        if found is None or found[0] is not data or found[1] != at:
            found = self._kept[name] = (data, at, make())
        return cast("Made", found[2])

    def _portions(self, data: HeldOut, rows: int) -> Iterable[tuple[slice, list[Tensor], list[Tensor]]]:
        # Portions of the data; few data in one, which is not made anew for every candidate.
        if len(data) > rows:
            return data.portions(rows)
        numbers = sum(some.numel() for some in (*data.features, *data.logits))
        return self._once("portion", data, None, numbers, lambda: list(data.portions(rows)))

    @property
    def can_be_cooled(self) -> bool:
        """Whether temperatures and distance exponents can be tried."""
        return True

    def curve(
        self, data: HeldOut, precisions: Sequence[float], temperature: float = 1.0, *, only: str | None = None
    ) -> dict[str, Tensor]:
        """What each candidate scores on held-out data; see `Problem.curve`.

        Args:
            data: as there.
            precisions: the candidates.
            temperature: what all logits are divided by.
            only: as there.

        Returns:
            As there.
        """
        return self._scored(data, len(precisions), self._tried(data, precisions, temperature), only)

    def cooled_curve(
        self,
        data: HeldOut,
        precisions: Sequence[float],
        coolings: Sequence[tuple[float, float]],
        *,
        only: str | None = None,
    ) -> dict[str, Tensor]:
        """What each way to cool scores on held-out data.

        Args:
            data: as for `curve`.
            precisions: one for each component.
            coolings: temperatures with distance exponents.
            only: as for `curve`.

        Returns:
            As `curve` does, one value for each of the coolings.
        """
        return self._scored(data, len(coolings), self._cooled_tries(data, precisions, coolings), only)

    def judged(self, data: HeldOut, precisions: Sequence[float], cooling: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Confidence in each of this process's data that have labels, and whether the answer is right, as 0 or 1.

        Where a datum puts several questions, both are means over those whose answer is known.

        Args:
            data: with labels.
            precisions: one for each component.
            cooling: temperature and distance exponent.

        Returns:
            (n,) both, in float64 and in one order; the order of the data only where the exponent is 0.
        """
        assert data.labels is not None
        sure, right = [torch.zeros(0, dtype=torch.float64, device="cpu") for _ in range(2)]
        for _, part, probs in self._cooled_tries(data, precisions, [cooling]):
            confidence, answer = probs[0].max(0)
            asked = self.likelihood.asked(data.labels[part])
            known, rows = asked >= 0, len(data.labels[part])
            counts = _by_datum(known.double(), rows)
            some = counts > 0
            for_each = [
                _by_datum(values * known, rows)[some] / counts[some]
                for values in (confidence, (answer == asked).double())
            ]
            sure, right = torch.cat([sure, for_each[0]]), torch.cat([right, for_each[1]])
        return sure, right

    def _cooled_tries(
        self, data: HeldOut, precisions: Sequence[float], coolings: Sequence[tuple[float, float]]
    ) -> Iterator[Tried]:
        mixing, outputs = self.weights_at(precisions), self.spectra[0].outputs
        logs = data.measured(self.geometries) if self.geometries is not None else None
        at, portion = tuple(precisions), max(1, LOGITS_AT_ONCE // outputs)
        alone = len(data) <= portion
        by_distance = logs is not None and any(exponent > 0 for _, exponent in coolings)
        posteriors = cache(
            partial(self._posteriors, data, at)
        )  # if at all, once for all portions: they may be too large to keep
        for part, features, means in self._portions(data, portion):
            of_part = (logs[0][:, part], logs[1][:, part]) if logs is not None and by_distance else None
            if self.link.cooled_by is None:
                spreads = [one.at(values) for one, values in zip(posteriors(), features, strict=True)]
                for index, by in enumerate(self._divisors(of_part, mixing, coolings, len(means[0]))):
                    probs = torch.zeros_like(means[0])
                    for weight, mean, spread, own in zip(mixing, means, spreads, by, strict=True):
                        probs += weight * self.link(LogitMoments(mean, spread, None, self.likelihood).divided(own))
                    yield slice(index, index + 1), part, self.likelihood.table(probs.T[None])
                continue
            numbers = len(means) * means[0].numel()
            make = partial(self._variances, data, at, features, posteriors, alone=alone)
            variances = self._once("variances", data, at, numbers, make) if alone else make()
            split = partial(self._groups, part, means, variances, of_part, mixing)
            for group in self._once("groups", data, (at, by_distance), numbers, split) if alone else split():
                alike = group.logs is None and len({temperature for temperature, _ in coolings}) == 1
                count = group.means[0].shape[1]
                divisors = self._divisors(group.logs, mixing, coolings[:1] if alike else coolings, count)
                together = max(1, LOGITS_AT_ONCE // max(1, count * outputs))
                for start in range(0, len(divisors), together):
                    tried = divisors[start : start + together]
                    which = slice(len(coolings)) if alike else slice(start, start + len(tried))
                    yield which, group.rows, self._cooled_by(tried, group, mixing)

    def _groups(
        self,
        part: slice,
        means: Sequence[Tensor],
        variances: Sequence[Tensor],
        logs: tuple[Tensor, Tensor] | None,
        mixing: Tensor,
    ) -> list[_Group]:
        # Apart where that saves work: about half of the data are no farther than usual, and few of these are longer.
        tables = [mean.T.contiguous() for mean in means]
        if logs is None:
            return [_Group(part, tables, variances, None)]
        cooling = Cooling(usual=self.usual[0])
        usual = (cooling.mean_log(logs[0], mixing) <= 0) & (cooling.excess_of(logs[1]) <= 1).all(0)
        groups = []
        for rows, own in ((usual, None), (~usual, logs)):
            places = rows.nonzero().squeeze(1)
            some = [[one.index_select(1, places) for one in every] for every in (tables, variances, own or ())]
            groups.append(
                _Group(places + part.start, some[0], some[1], None if own is None else (some[2][0], some[2][1]))
            )
        return groups

    def _cooled_by(self, divisors: Tensor, group: _Group, mixing: Tensor) -> Tensor:
        # The mixture's probabilities (L, A, m) of logits that are divided by (L, K, n).
        total = None
        for weight, mean, variance, own in zip(mixing, group.means, group.variances, divisors.unbind(1), strict=True):
            probs = cooled_table(self.link, self.likelihood, mean, variance, own[:, None].square())
            if len(mixing) > 1:
                probs.mul_(weight)
            total = probs if total is None else total.add_(probs)
        assert total is not None  # a mixture has a component
        return total

    def _posteriors(self, data: HeldOut, at: tuple[float, ...]) -> list[Posterior]:
        numbers = sum(one.features * one.projection_size for one in self.spectra)
        pairs = zip(self.spectra, at, strict=True)
        return self._once("posteriors", data, at, numbers, lambda: [one.posterior(prior) for one, prior in pairs])

    def _variances(
        self,
        data: HeldOut,
        at: tuple[float, ...],
        features: Sequence[Tensor],
        posteriors: Callable[[], Sequence[Posterior]],
        *,
        alone: bool,
    ) -> list[Tensor]:
        # Variances (C, n) of each network's logits, as the link asks for them.
        contrast = self.link.cooled_by == "contrast_variance"
        if alone and self._projected_numbers(data) <= FEW_NUMBERS:  # kept, and often there: a search came before
            tried = zip(self.spectra, self._projections(data, features), at, strict=True)
            return [one.variances(projected, [prior], contrast=contrast)[0] for one, projected, prior in tried]
        spreads = [one.at(values) for one, values in zip(posteriors(), features, strict=True)]
        return [(one.contrast_variance() if contrast else one.variance()).T for one in spreads]

    def _projected_numbers(self, data: HeldOut) -> int:
        return len(data) * sum(one.projection_size for one in self.spectra)

    def _projections(self, data: HeldOut, features: Sequence[Tensor]) -> list[Tensor]:
        make = partial(_projected, self.spectra, features)
        return self._once("projections", data, None, self._projected_numbers(data), make)

    def _divisors(
        self,
        logs: tuple[Tensor, Tensor] | None,
        mixing: Tensor,
        coolings: Sequence[tuple[float, float]],
        count: int,
    ) -> Tensor:
        # What the logits of some of the data are divided by (L, K, n): by temperatures alone where no distances (K, n)
        # are given.
        if logs is None:
            temperatures = torch.tensor([one for one, _ in coolings], dtype=torch.float64, device="cpu")
            return temperatures[:, None, None].expand(-1, len(mixing), count)
        return Cooling(usual=self.usual[0]).divisors_at(coolings, *logs, mixing)

    def _tried(self, data: HeldOut, precisions: Sequence[float], temperature: float = 1.0) -> Iterator[Tried]:
        if self.link.needs_covariance:
            return self._by_candidate(data, precisions, temperature)
        return self._by_portion(data, precisions, temperature)

    def _by_portion(self, data: HeldOut, precisions: Sequence[float], temperature: float) -> Iterator[Tried]:
        # Probabilities of every candidate, where variances are enough: data are projected once, for all candidates.
        mixing = torch.stack([self.weights_at(precision) for precision in precisions])
        projected = PROJECTED_AT_ONCE // sum(spectrum.projection_size for spectrum in self.spectra)
        outputs = self.spectra[0].outputs
        portion = max(1, min(projected, LOGITS_AT_ONCE // outputs))
        alone = len(data) <= portion
        for part, features, means in self._portions(data, portion):
            projections = self._projections(data, features) if alone else _projected(self.spectra, features)
            if self.link.cooled_by is None:
                for index, precision in enumerate(precisions):
                    tried = [
                        Candidate(spectrum, precision, *values)
                        for spectrum, *values in zip(self.spectra, projections, features, strict=True)
                    ]
                    yield slice(index, index + 1), part, self._mixed(mixing[index], means, tried, temperature)
                continue
            widest, count = max(spectrum.features for spectrum in self.spectra), len(means[0])
            # All candidates of some data rather than all data of some candidates: what was projected is much more to read.
            rows = max(ROWS_AT_ONCE, LOGITS_AT_ONCE // (len(precisions) * outputs))
            for first in range(0, count, rows):
                some, last = slice(first, first + rows), min(first + rows, count)
                own = [one[some] for one in means], [one[some] for one in projections]
                of_data = slice(part.start + first, part.start + last)
                together = min(LOGITS_AT_ONCE // ((last - first) * outputs), WEIGHTS_AT_ONCE // (outputs * widest))
                for start in range(0, len(precisions), max(1, together)):
                    which = slice(start, start + max(1, together))
                    yield which, of_data, self._cooled(mixing[which], *own, precisions[which], temperature)

    def _cooled(
        self,
        mixing: Tensor,
        means: Sequence[Tensor],
        projections: Sequence[Tensor],
        precisions: Sequence[float],
        temperature: float,
    ) -> Tensor:
        # The mixture's probabilities (L, A, m) under several candidates, where the link cools logits by their
        # variances.
        contrast, total = self.link.cooled_by == "contrast_variance", None
        squares = None if temperature == 1 else means[0].new_tensor(temperature**2)
        for weights, mean, projected, spectrum in zip(mixing.T, means, projections, self.spectra, strict=True):
            variances = spectrum.variances(projected, precisions, contrast=contrast)
            probs = cooled_table(self.link, self.likelihood, mean.T.contiguous(), variances, squares)
            if len(means) > 1:
                probs.mul_(weights[:, None, None])
            total = probs if total is None else total.add_(probs)
        assert total is not None  # a mixture has a component
        return total

    def _by_candidate(self, data: HeldOut, precisions: Sequence[float], temperature: float) -> Iterator[Tried]:
        # The same where a link needs covariances: each candidate's posteriors are built once, for all data.
        portion = max(1, PROJECTED_AT_ONCE // sum(spectrum.features for spectrum in self.spectra))
        bar = tqdm(precisions, desc="candidates", disable=None if self.progress else True, leave=False)
        start = time.monotonic()
        for index, precision in enumerate(bar):
            if index == 1:
                self._announce(time.monotonic() - start, len(precisions) - 1, len(data))
            mixing, tried = self.weights_at(precision), [spectrum.posterior(precision) for spectrum in self.spectra]
            for part, features, means in data.portions(portion):
                spreads = [posterior.at(values) for posterior, values in zip(tried, features, strict=True)]
                yield slice(index, index + 1), part, self._mixed(mixing, means, spreads, temperature)

    def _announce(self, seconds: float, left: int, count: int) -> None:
        if seconds * left < PATIENCE:
            return
        warn(
            f"tuning with link {self.link.name!r} will take about {_duration(seconds * left)}: {seconds:.2g} s for each of {left} "
            f"more prior precisions, with {self.spectra[0].outputs} classes, {count} validation data and {len(self.spectra)} "
            f"network(s). Fewer validation data, a rule with a shorter grid, such as mola.ValidationScore(grid=...), or link "
            f"'probit-centered' take less."
        )

    def _mixed(self, mixing: Tensor, means: Sequence[Tensor], spreads: Sequence[Spread], temperature: float) -> Tensor:
        probs = torch.zeros_like(means[0])
        for weight, mean, spread in zip(mixing, means, spreads, strict=True):
            moments = LogitMoments(mean, spread, None, self.likelihood)
            probs += weight * self.link(moments if temperature == 1 else moments.divided(mean.new_tensor(temperature)))
        return self.likelihood.table(probs.T[None])


def _projected(spectra: Sequence[Spectrum], features: Sequence[Tensor]) -> list[Tensor]:
    return [spectrum.project(values) for spectrum, values in zip(spectra, features, strict=True)]


class _Scores:
    # Sums over the data of what candidates score: of all scores, or of one.

    def __init__(self, count: int, only: str | None) -> None:
        self.only = only
        self.sums = torch.zeros(count, 3, dtype=torch.float64, device="cpu")
        # Of confidence less right answers: the calibration error asks for nothing else.
        self.bins = torch.zeros(count, BINS, dtype=torch.float64, device="cpu")
        self.counts = torch.zeros(count, dtype=torch.float64, device="cpu")

    def add(self, which: slice, probs: Tensor, labels: Tensor | None) -> None:
        """Take more data: probabilities (L, A, m) under some candidates, and right answers (m,), -1 where none is known."""
        if labels is not None and bool((labels < 0).any()):
            known = labels >= 0
            probs, labels = probs[:, :, known], labels[known]
        self.counts[which] += probs.shape[2]
        if labels is None:
            self.sums[which, :2] += torch.stack([probs.amax(1).sum(1), -_log(probs).mean(1).sum(1)], dim=1)
            return
        own = probs.gather(1, labels.expand(len(probs), 1, -1)).squeeze(1)
        if self.only in (None, "nll"):
            self.sums[which, 1] -= _log(own).sum(1)
        if self.only in (None, "brier"):
            squares = torch.linalg.vector_norm(probs, dim=(1, 2)).square()
            self.sums[which, 2] += squares - 2 * own.sum(1) + len(labels)
        if self.only in (None, "confidence", "ece"):
            confidence = probs.amax(1)
            self.sums[which, 0] += confidence.sum(1)
            # Which class is largest takes several times as long to find as how large it is, and matters in a tie alone.
            tied = int(torch.count_nonzero(probs == confidence[:, None])) != confidence.numel()
            right = probs.argmax(1) == labels if tied else own == confidence
            gaps = torch.zeros(len(probs), BINS, dtype=torch.float64, device="cpu")
            self.bins[which] += gaps.scatter_add_(1, bin_index(confidence, BINS), confidence - right.double())


def _duration(seconds: float) -> str:
    # In words: minutes, or hours where there are many.
    minutes = seconds / 60
    return (
        f"{minutes:.0f} minutes" if 1.5 <= minutes < 90 else "1 minute" if minutes < 90 else f"{minutes / 60:.1f} hours"
    )


def _by_datum(values: Tensor, count: int) -> Tensor:
    # Sums (n,) over the questions of each of n data, from numbers (m,) in the order of `Likelihood.asked`.
    return values.view(len(values) // max(1, count), count).sum(0) if len(values) else values


def _log(probs: Tensor) -> Tensor:
    return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
