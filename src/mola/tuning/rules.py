"""Rules that choose the prior precision lambda: by confidence, validation score, evidence or outliers.

Each rule reads its data once. Whatever the number of candidates, the networks are not run again. With a link that needs
variances alone (the probit, plain or centred) a candidate costs one small product in the eigenbasis of the curvature;
with the others, what predicting the held-out features costs. The search over one positive number comes first in this file: a grid that
grows past an end that wins, or a smooth maximum to convergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mola.errors import OptionError, warn
from mola.options import is_real, one_of
from mola.tuning.candidates import HeldOut, LastLayerProblem, Problem, Tuning
from mola.tuning.regression import RegressionProblem

SMALLEST, LARGEST = 1e-24, 1e12
"""How far a grid may grow. Below, the prior says nothing any more; above, no spread is left around the trained weights."""

STEPS = round(99 / 7)
"""Candidates in a decade: the density of the paper's grid of 100 values from 1e-4 to 1e3."""


def log_grid(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` values from `low` to `high`, evenly spaced in the logarithm."""
    return tuple(torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64, device="cpu").tolist())


PAPER_GRID = log_grid(1e-4, 1e3, 100)

TEMPERATURES = (*log_grid(0.1, 0.95, 32), 1.0)
"""Tried where networks may be less sure than they are right; the best of them is refined."""

STEP = 9.5 ** (1 / 31)
"""From one of them to the next."""

ROUNDS = 3
"""Of temperature and prior precision in turn. Both make logits smaller: more rounds move along a valley in which one makes up for the
other, for little gain in the score."""

BEYOND_DOUBT = 2.0
"""Standard errors by which networks must be less sure than they are right before they are made surer."""

TURNS = 20
"""Of prior precision and noise in turn, at most: neither moves any more after a few."""

SETTLED = 1e-3
"""Relative change of the noise that is none."""

ALIKE = 1e-3
"""Log loss for each output, in nats, up to which prior precisions score alike; of other scores, the same share."""

STEEPEST = 100
"""Steps of Newton's method, at most."""

FACTORS = tuple(4.0 ** (step / 8) for step in range(-8, 9))
"""Of the noise, tried around the one there is; then those between two of them, twice."""

SAME = 1e-9
"""Relative difference of scores that are the same but for rounding."""

SMOOTH = ("nll", "brier")
"""Scores that are smooth in the prior precision: the calibration error jumps where data change their bins."""

SCORES = {"nll": "log loss", "brier": "Brier score", "ece": "calibration error"}
"""What scores are called in notes."""


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    """The candidates in ascending order."""
    try:
        values = tuple(sorted(float(value) for value in grid))
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"grid must hold finite numbers above 0, got {grid!r}.") from error
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise OptionError(f"grid must hold finite numbers above 0, got {list(grid)!r}.")
    return values


class Search:
    """Candidates and their curve, growing by a decade past an end that wins."""

    def __init__(
        self,
        evaluate: Callable[[Sequence[float]], dict[str, Tensor]],
        grid: Sequence[float] | None,
        smooth: str | None = None,
    ) -> None:
        self.evaluate, self.smooth = evaluate, smooth
        self.grid = list(PAPER_GRID if grid is None else check_grid(grid))
        self.first_grid = (self.grid[0], self.grid[-1])
        self.curve = self.evaluate(self.grid) if smooth is None else self._around_valleys(self.grid, smooth)

    def _around_valleys(self, grid: Sequence[float], score: str, *also: int) -> dict[str, Tensor]:
        # Every ninth candidate, both ends and some others first, then those around each valley that these show.
        count, curve = len(grid), dict[str, Tensor]()
        tried: set[int] = set()
        for step in (9, 3, 1):
            if not curve:
                places = {*range(0, count, step), count - 1, *also}
            else:
                known = sorted(tried)
                values = curve[score][known].tolist()
                ends, sides = [math.inf, *values, math.inf], [-1, *known, count]
                valleys = [k for k in range(len(known)) if values[k] <= min(ends[k], ends[k + 2])]
                places = {
                    place
                    for k in valleys
                    for place in (known[k] + away * step for away in (-2, -1, 1, 2))
                    if sides[k] < place < sides[k + 2] and place not in tried
                }
            order = sorted(places)
            for name, scores in (self.evaluate([grid[place] for place in order]) if order else {}).items():
                curve.setdefault(name, torch.full((count,), math.inf, dtype=scores.dtype, device="cpu"))[order] = scores
            tried |= places
        return curve

    def grow(self, *, down: bool) -> bool:
        """Add a decade below or above; False where the grid may not grow further."""
        end, factor = (self.grid[0], 0.1) if down else (self.grid[-1], 10.0)
        if not SMALLEST < end < LARGEST:
            return False
        added = [end * factor ** (step / STEPS) for step in range(1, STEPS + 1)]
        # The last but one tells whether a smooth score still falls at the end: then nothing else there need be tried.
        smooth = self.smooth
        scores = self.evaluate(added) if smooth is None else self._around_valleys(added, smooth, STEPS - 2)
        if down:
            self.grid = added[::-1] + self.grid
            self.curve = {name: torch.cat([scores[name].flip(0), self.curve[name]]) for name in scores}
        else:
            self.grid += added
            self.curve = {name: torch.cat([self.curve[name], scores[name]]) for name in scores}
        return True

    def flat(self, score: str, *, down: bool) -> bool:
        """Whether the last candidates towards an end score alike: growing further would change nothing."""
        values = self.curve[score][:STEPS] if down else self.curve[score][-STEPS:]
        return len(values) > 1 and float(values.max() - values.min()) <= SAME * float(values.abs().max())

    def notes(self, chosen: float, rule: str) -> tuple[str, ...]:
        """Say whether the grid grew, what that means for the value that was chosen, and what can be done.

        Args:
            chosen: the value.
            rule: or score by which it was chosen: no use to advise it.

        Returns:
            The notes, which were warned of.
        """
        if (self.grid[0], self.grid[-1]) == self.first_grid:
            return ()
        low, high = self.first_grid
        note = (
            f"the search for the prior precision reached the end of its grid [{low:.3g}, {high:.3g}] and went on to "
            f"[{self.grid[0]:.3g}, {self.grid[-1]:.3g}]. Took {chosen:.3g}"
        )
        other = "'nll'" if rule != "nll" else "'threshold'"
        if chosen < low:
            note += (
                f": the prior says next to nothing, and the training data alone set the covariance. If confidence outside the data "
                f"is then too low, use another rule, such as {other}, or set the prior precision yourself."
            )
        elif chosen > high:
            note += (
                f": little covariance is left, and predictions are close to the plain ensemble's. For more caution, use another rule, "
                f"such as {other}, or set the prior precision yourself."
            )
        else:
            note += ", inside the first grid: nothing needs to be done."
        warn(note)
        return (note,)

    def table(self) -> dict[str, tuple[float, ...]]:
        """The curve as plain numbers."""
        return {"prior_precision": tuple(self.grid)} | {
            name: tuple(values.tolist()) for name, values in self.curve.items()
        }


def maximise(objective: Callable[[Tensor], Tensor], *, tell: bool = True) -> float:
    """Where a smooth function of a positive number is largest: a wide grid, then bisection of the slope.

    Args:
        objective: of the logarithm's exponential; differentiable.
        tell: whether to warn if there is no maximum inside.

    Returns:
        The number.
    """

    def slope(log_precision: float) -> float:
        with torch.enable_grad():
            position = torch.tensor(log_precision, dtype=torch.float64, device="cpu", requires_grad=True)
            (gradient,) = torch.autograd.grad(objective(position.exp()), position)
        return float(gradient)

    positions = torch.linspace(math.log(1e-16), math.log(1e16), 257, dtype=torch.float64, device="cpu").tolist()
    with torch.no_grad():
        values = [
            float(objective(torch.tensor(position, dtype=torch.float64, device="cpu").exp())) for position in positions
        ]
    peak = max(range(len(values)), key=values.__getitem__)
    low, high = positions[max(peak - 1, 0)], positions[min(peak + 1, len(positions) - 1)]
    if slope(low) <= 0 or slope(high) >= 0:
        note = f"the log evidence has no interior maximum in the prior precision; took {math.exp(positions[peak]):.3g}."
        if tell:
            warn(note)
        return math.exp(positions[peak])
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
        if middle in (low, high) and high - low < 1e-13:
            break
    return math.exp((low + high) / 2)


class Rule(Protocol):
    """A way to choose the prior precision."""

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the data once, and choose."""


FEW_DATA = "few validation data"
"""How a note begins that says that the target of the threshold rule is known no better than its margin."""


def _points(share: float, digits: int = 4) -> str:
    text = f"{100 * share:.{digits}g}"
    return f"{text} point" if text == "1" else f"{text} points"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def require_data(val_loader: Iterable[Any] | None, rule: object) -> Iterable[Any]:
    """The validation data."""
    if val_loader is None:
        raise OptionError(f"{type(rule).__name__} needs validation data: posterior.tune(val_loader, rule=...).")
    return val_loader


def refuse_numbers(problem: Problem, rule: str) -> None:
    """Refuse a rule that is about classes."""
    if problem.has_noise:
        known = ", ".join(problem.likelihood.rules)
        raise OptionError(
            f"{rule} is about the confidence in classes, and means nothing for likelihood {problem.likelihood.name!r}: use one of "
            f"{known}."
        )


@dataclass(frozen=True)
class ConfidenceThreshold:
    """The paper's rule: the smallest prior precision whose mean confidence on validation data meets a threshold.

    Args:
        confidence: threshold on the mean confidence; None sets it `margin` below the networks' own mean accuracy on the
            validation data, as the paper does (0.98 for a network of 99.2 %, 0.94 for one of 94.8 %).
        brier: threshold on the Brier score, to be met as well; None asks nothing.
        margin: how far below the accuracy the default threshold lies.
        grid: candidates, which grow past an end that wins; None is the paper's, 100 values from 1e-4 to 1e3.
    """

    confidence: float | None = None
    brier: float | None = None
    margin: float = 0.01
    grid: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.confidence is not None and not (is_real(self.confidence) and 0 < self.confidence <= 1):
            raise OptionError(f"confidence must lie between 0 and 1, got {self.confidence!r}. 95 % is 0.95.")
        if not (is_real(self.margin) and -1 <= self.margin <= 1):
            raise OptionError(f"margin must lie between -1 and 1, got {self.margin!r}. One percentage point is 0.01.")
        if self.brier is not None and not (is_real(self.brier) and 0 <= self.brier <= 2):
            raise OptionError(f"brier must lie between 0 and 2, got {self.brier!r}.")

    def words(self, accuracy: float | None = None, least: float = 0.0) -> str:
        """The rule's name, its target, and where that comes from: the single networks' mean accuracy, or the user.

        Args:
            accuracy: of the single networks, on average; None if the user has given the target.
            least: confidence that there can be, 1 / C.

        Returns:
            The words.
        """
        if accuracy is None:
            target = f"{_percent(float(self.confidence or 0))}, as given"
        else:
            points = _points(self.margin)
            lowered = accuracy - self.margin
            target = f"{_percent(max(lowered, least))}, "
            target += (
                f"the single networks' mean accuracy {_percent(accuracy)} less {points}"
                if lowered > least
                else f"the lowest there is: the single networks' mean accuracy {_percent(accuracy)} is no better than guessing"
            )
        also = "" if self.brier is None else f"; Brier score at most {self.brier:.4g}"
        return f"ConfidenceThreshold: target confidence {target}{also}"

    def target(self, data: HeldOut) -> tuple[float, str, tuple[str, ...]]:
        """The mean confidence to meet on these data, the rule in words, and notes for the user."""
        if self.confidence is not None:
            return self.confidence, self.words(), ()
        accuracy, error = data.mean_accuracy()
        # No confidence is below 1 / C: a lower target would be met by every candidate, and say nothing.
        least = 1 / data.likelihood.answers(data.logits[0].shape[1])
        notes: tuple[str, ...] = ()
        if error > self.margin:
            notes = (
                f"{FEW_DATA}: the mean accuracy {_percent(accuracy)} is known to {_points(error, 2)} (its "
                f"standard error), and the target confidence no better. More data make it surer, or pass your own.",
            )
        return max(accuracy - self.margin, least), self.words(accuracy, least), notes

    def search(self, problem: Problem, data: HeldOut, threshold: float, *, meant: bool) -> tuple[Search, Tensor]:
        """Candidates around the smallest one that meets the threshold, and which of them do.

        Args:
            problem: the mixture.
            data: validation data.
            threshold: on the mean confidence.
            meant: False for labels that fit no better than guesses: they give no reason to look below the grid.

        Returns:
            The search, and a truth value for each candidate.
        """

        def passing(curve: dict[str, Tensor]) -> Tensor:
            meets = curve["confidence"] >= threshold
            return meets if self.brier is None else meets & (curve["brier"] <= self.brier)

        search = Search(lambda grid: problem.curve(data, grid), self.grid)
        while (
            meant
            and bool(passing(search.curve)[0])
            and not search.flat("confidence", down=True)
            and search.grow(down=True)
        ):
            pass
        while not bool(passing(search.curve).any()) and not search.flat("confidence", down=False):
            if not search.grow(down=False):
                break
        return search, passing(search.curve)

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the validation data once, and choose."""
        refuse_numbers(problem, "rule 'threshold'")
        needs_labels = self.confidence is None or self.brier is not None
        data = problem.read(require_data(val_loader, self), "validation loader", needs_labels)
        threshold, words, notes = self.target(data)
        accuracy, meant = 0.0, True
        if self.confidence is None:
            accuracy, meant = data.mean_accuracy()[0], not data.guessed()

        search, meets = self.search(problem, data, threshold, meant=meant)
        if bool(meets.any()):
            chosen = search.grid[int(meets.nonzero()[0])]
            notes = (*notes, *search.notes(chosen, "threshold"))
        else:
            chosen = search.grid[-1]
            aims = f"mean confidence of at least {threshold:.4f}" + (
                "" if self.brier is None else f" and Brier score of at most {self.brier:.4f}"
            )
            plain = float(search.curve["confidence"][-1])
            why = (
                f", below the mean accuracy of {accuracy:.4f}. These networks are less sure than they are right, as after label "
                f"smoothing or mixup, and covariance only lowers confidence"
                if self.confidence is None
                else ". Covariance only lowers confidence"
            )
            note = (
                f"no prior precision gives a {aims} on the validation data: with next to no covariance the mean confidence is "
                f"{plain:.4f}{why}: took the largest prior precision tried, {chosen:.3g}, all but the plain ensemble. For networks as "
                f"sure as they are right, use rule='nll' or rule='distance', which sharpen logits by a temperature below 1 where the "
                f"validation data show that it is needed. `ood_score` does not depend on any of this."
            )
            warn(note)
            notes = (*notes, note)
        return Tuning(words, (chosen,) * len(problem.spectra), search.table(), notes)


def _smallest(search: Search, score: str, *, meant: bool) -> int:
    # Labels that are not `meant`, as they fit no better than guesses, give no reason to look below the grid.

    def best() -> int:
        return int(search.curve[score].argmin())

    while True:
        index, value = best(), float(search.curve[score].min())
        at_end = index in (0, len(search.grid) - 1)
        if not at_end or (index == 0 and not meant) or not search.grow(down=index == 0):
            break
        if value - float(search.curve[score].min()) <= SAME * abs(value):
            break
    return best()


def _told(search: Search, index: int, score: str, rule: str) -> tuple[str, ...]:
    # Notes on a smallest score: a grid that grew, an end that won.
    notes = search.notes(search.grid[index], score)
    if index in (0, len(search.grid) - 1):
        what = "no prior at all" if index == 0 else "no covariance at all: the plain ensemble"
        note = f"{rule}: no interior optimum; the best is {what} (prior precision {search.grid[index]:.3g})."
        warn(note)
        notes = (*notes, note)
    return notes


class Sharper(NamedTuple):
    """A temperature below 1 that the validation data ask for, with the prior precisions that were tried at it."""

    temperature: float
    search: Search
    best: int
    """Which of the prior precisions is the best."""
    notes: tuple[str, ...]


def sharpened(problem: Problem, data: HeldOut, search: Search, index: int, score: str) -> Sharper | None:
    """A temperature below 1, if validation data show beyond doubt that the networks are less sure than they are right.

    Covariance only lowers confidence. Networks that were trained with label smoothing or mixup need the opposite. It is done only
    where the mean confidence is below the accuracy by more than two standard errors of the difference.

    Args:
        problem: the mixture.
        data: validation data, with labels.
        search: prior precisions that were tried without a temperature.
        index: the best of them.
        score: to be as small as can be.

    Returns:
        None if logits should stay as they are.
    """
    if not isinstance(problem, LastLayerProblem):
        return None  # every candidate would be another pass over whole networks
    count, temperature, lowest = len(problem.spectra), 1.0, TEMPERATURES[0]
    sure, right = problem.judged(data, (search.grid[index],) * count, (1.0, 0.0))
    gap, error, (accuracy, confidence) = _paired(data, right, sure)
    if gap <= BEYOND_DOUBT * error:
        return None
    before, (low, high) = float(search.curve[score][index]), search.first_grid
    first = [one for one in search.grid if low <= one <= high]
    for _ in range(ROUNDS):
        tried = TEMPERATURES
        if temperature != 1:
            tried = log_grid(max(lowest, temperature / STEP), min(1.0, temperature * STEP), 17)
        coolings = [(one, 0.0) for one in tried]
        curve = problem.cooled_curve(data, (search.grid[index],) * count, coolings, only=score)[score]
        if float(curve[-1] - curve.min()) <= SAME * abs(float(curve[-1])) and tried[-1] == 1:
            return None  # also where a link does not depend on temperatures
        temperature = tried[int(curve.argmin())]
        tried_at = partial(problem.curve, data, temperature=temperature, only=search.smooth)
        search = Search(tried_at, first, search.smooth)
        index = _smallest(search, score, meant=True)
    after = float(search.curve[score][index])
    note = (
        f"these networks are less sure than they are right, as after label smoothing or mixup: on the validation data the mean "
        f"confidence is {_percent(confidence)} and the accuracy {_percent(accuracy)}, {gap / error:.1f} standard errors apart. "
        f"Logits are sharpened by a temperature of {temperature:.3g}, which takes the {SCORES[score]} from "
        f"{before:.4g} to {after:.4g}."
    )
    if temperature > lowest * (1 + SAME):
        return Sharper(temperature, search, index, (note,))
    end = (
        f"{temperature:.3g} is the lowest temperature that is tried, and the best of them: a lower one may do better. Networks with "
        f"logits this small were hardly trained, or scale their outputs. posterior.with_temperature sets a lower temperature."
    )
    warn(end)
    return Sharper(temperature, search, index, (note, end))


def _paired(data: HeldOut, first: Tensor, second: Tensor) -> tuple[float, float, tuple[float, float]]:
    fall = first - second
    size = fall.new_tensor(float(len(fall)))
    sums = torch.stack([size, fall.sum(), fall.square().sum(), first.sum(), second.sum()])
    count, total, squares, one, other = data.team.sum([sums])[0].tolist()
    mean = total / count
    # At least 1 / (count + 2), as for an accuracy: a few data are still a few where all are right.
    error = max(math.sqrt(max(0.0, squares / count - mean**2) / count), 1 / (count + 2))
    return mean, error, (one / count, other / count)


def _with_noise(problem: RegressionProblem, data: HeldOut, score: str, grid: Sequence[float] | None) -> Tuning:
    # The prior precision and, unless it was given, the noise that do best on validation data: one after the other, in
    # turns. With many data the score hardly depends on the prior precision, and its smallest value is chance: it may be
    # at no prior at all, or at no covariance at all, which both tell nonsense outside the data. Of those that score
    # alike the one nearest to 1 is taken.
    factor = problem.first_factor(data) if problem.noise_is_free else 1.0
    alike = ALIKE * problem.spectra[0].outputs
    for _ in range(TURNS):
        search = Search(partial(problem.curve, data, factor=factor, only=score), grid)
        index, before = _nearest(search, score, alike), factor
        if not problem.noise_is_free:
            break
        factor = _best_factor(partial(problem.noise_curve, data, search.grid[index], score=score), factor)
        if abs(math.log(factor / before)) < SETTLED:
            break
    name, count, chosen = f"ValidationScore({score!r})", len(problem.spectra), search.grid[index]
    notes: tuple[str, ...] = ()
    if not search.first_grid[0] <= chosen <= search.first_grid[1]:
        what = "next to no prior: the training data alone set the covariance" if chosen < 1 else "next to no covariance"
        notes = (
            f"{name}: the prior precision that does best, {chosen:.3g}, lies outside the grid from {search.first_grid[0]:.3g} to "
            f"{search.first_grid[1]:.3g}, and means {what}. If that says nonsense outside the data, use rule 'evidence'.",
        )
        warn(notes[0])
    factors = (factor,) * count if problem.noise_is_free else ()
    return Tuning(name, (chosen,) * count, search.table(), notes, noise_factors=factors)


def _nearest(search: Search, score: str, alike: float) -> int:
    # Which candidate is nearest to 1 of those whose score is the smallest, give or take `alike`; the grid grows where
    # an end wins.
    while True:
        values = search.curve[score]
        index, value = int(values.argmin()), float(values.min())
        room = alike if score == "nll" else alike * abs(value)
        at_end = index in (0, len(search.grid) - 1)
        if not at_end or not search.grow(down=index == 0) or value - float(search.curve[score].min()) <= room:
            break
    values = search.curve[score]
    close = (values <= values.min() + room).nonzero().flatten().tolist()
    return min(close, key=lambda place: abs(math.log(search.grid[place])))


def _best_factor(scored: Callable[[Sequence[float]], Tensor], around: float) -> float:
    tried = [around * one for one in FACTORS]
    for step in (2, 16, 128):
        place = int(scored(tried).argmin())
        around = tried[place]
        if step < 128:
            tried = [around * one ** (1 / step / 4) for one in FACTORS]
    return around


@dataclass(frozen=True)
class ValidationScore:
    """The prior precision that does best on validation data.

    Where the data show beyond doubt that the networks are less sure than they are right, logits are sharpened by a temperature, too.
    Where outputs are numbers, their noise is chosen with it, unless it was given.

    Args:
        score: "nll", "brier" or "ece"; for numbers "nll" or "crps".
        grid: candidates, which grow past an end that wins; None is the paper's, 100 values from 1e-4 to 1e3.
    """

    score: Literal["nll", "brier", "ece", "crps"] = "nll"
    grid: Sequence[float] | None = None

    def __post_init__(self) -> None:
        one_of(self.score, ("nll", "brier", "ece", "crps"), "score")

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read the validation data once, and choose.

        Args:
            problem: the mixture.
            val_loader: the validation data, with labels.

        Returns:
            The choice.
        """
        given, rules = require_data(val_loader, self), problem.likelihood.rules
        if self.score not in rules:
            known = ", ".join(rules)
            raise OptionError(
                f"score {self.score!r} means nothing for likelihood {problem.likelihood.name!r}: use one of {known}."
            )
        data = problem.read(given, "validation loader", True)
        if isinstance(problem, RegressionProblem):
            return _with_noise(problem, data, self.score, self.grid)
        return self._best(problem, data, None)

    def best(self, problem: Problem, data: HeldOut) -> Tuning:
        """The same choice without the whole curve, for rules that go on from there: most candidates need not be tried.

        The log loss and the Brier score are smooth in the logarithm of the prior precision, over far more than a step of the grid.
        """
        return self._best(problem, data, self.score if self.score in SMOOTH else None)

    def _best(self, problem: Problem, data: HeldOut, smooth: str | None) -> Tuning:
        search = Search(partial(problem.curve, data, only=smooth), self.grid, smooth)
        name, meant = f"ValidationScore({self.score!r})", not data.guessed()
        index = _smallest(search, self.score, meant=meant)
        sharper = sharpened(problem, data, search, index, self.score) if meant else None
        temperature, also = 1.0, tuple[str, ...]()
        if sharper is not None:
            temperature, search, index, also = sharper
        notes = (*_told(search, index, self.score, name), *also)
        return Tuning(name, (search.grid[index],) * len(problem.spectra), search.table(), notes, temperature)


@dataclass(frozen=True)
class OutlierExposure:
    """Validation log-loss plus a penalty for confidence on outliers: their cross-entropy to the uniform distribution.

    Args:
        loader: batches of outliers; labels are not read.
        weight: of the penalty.
        grid: candidates, which grow past an end that wins; None is the paper's, 100 values from 1e-4 to 1e3.
    """

    loader: Iterable[Any] = field(repr=False)
    weight: float = 0.25
    grid: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not (is_real(self.weight) and 0 <= self.weight < float("inf")):
            raise OptionError(f"weight must be a finite number of at least 0, got {self.weight!r}.")

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None) -> Tuning:
        """Read both loaders once, and choose."""
        refuse_numbers(problem, "OutlierExposure")
        data = problem.read(require_data(val_loader, self), "validation loader", True)
        outliers = problem.read(self.loader, "outlier loader", False)
        unlabelled = replace(outliers, labels=None)

        def evaluate(grid: Sequence[float]) -> dict[str, Tensor]:
            curve, outside = problem.curve(data, grid), problem.curve(unlabelled, grid)
            curve["outlier_confidence"] = outside["confidence"]
            curve["objective"] = curve["nll"] + self.weight * outside["uniform"]
            return curve

        search, name = Search(evaluate, self.grid), f"OutlierExposure(weight={self.weight})"
        index = _smallest(search, "objective", meant=not data.guessed())
        notes = _told(search, index, "objective", name)
        return Tuning(name, (search.grid[index],) * len(problem.spectra), search.table(), notes)


@dataclass(frozen=True)
class Evidence:
    """The prior precision that makes the training labels most probable: no validation data needed.

    Args:
        shared: one prior precision for all components, which maximises the sum of their log evidences; False gives
            each component its own.
    """

    shared: bool = True

    def choose(self, problem: Problem, val_loader: Iterable[Any] | None = None) -> Tuning:
        """Maximise the log evidence to convergence.

        Args:
            problem: the mixture.
            val_loader: must be None: nothing but the training data is used.

        Returns:
            The choice.
        """
        if val_loader is not None:
            raise OptionError(
                "Evidence uses the training data alone: call posterior.tune(rule=mola.Evidence()) without a loader."
            )
        components = range(len(problem.spectra))
        if isinstance(problem, RegressionProblem) and problem.noise_is_free:
            return self._with_noise(problem)
        if self.shared:
            best = maximise(
                lambda precision: sum(
                    (problem.log_evidence(k, precision) for k in components), torch.zeros((), device="cpu")
                )
            )
            return Tuning("Evidence(shared=True)", (best,) * len(problem.spectra))
        chosen = tuple(maximise(lambda precision, k=k: problem.log_evidence(k, precision)) for k in components)  # type: ignore[misc]
        return Tuning("Evidence(shared=False)", chosen)

    def _with_noise(self, problem: RegressionProblem) -> Tuning:
        count = len(problem.spectra)
        precisions, factors = [1.0] * count, [1.0] * count
        for group in [range(count)] if self.shared else [range(index, index + 1) for index in range(count)]:

            def total(precision: Tensor, factor: float = 1.0, group: range = group) -> Tensor:
                each = problem.evidence_at(factor)
                return sum((each[index](precision) for index in group), torch.zeros((), device="cpu"))

            start = maximise(total, tell=False)
            precision, factor = _climb(total, start)
            for index in group:
                precisions[index], factors[index] = precision, factor
        return Tuning(f"Evidence(shared={self.shared})", tuple(precisions), noise_factors=tuple(factors))


def _climb(objective: Callable[[Tensor, float], Tensor], precision: float) -> tuple[float, float]:
    # Where a function of the prior precision and of a factor of the noise is largest, from a good prior precision and a
    # factor of 1. Newton's method over both logarithms, with differences in place of derivatives; a step that leads
    # down is halved.
    place, step = torch.tensor([math.log(precision), 0.0], dtype=torch.float64, device="cpu"), 1e-3
    moves = step * torch.eye(2, dtype=torch.float64, device="cpu")

    def at(where: Tensor) -> float:
        with torch.no_grad():
            return float(objective(where[0].exp(), math.exp(float(where[1]))))

    for _ in range(STEEPEST):
        here = at(place)
        ahead, behind = [at(place + move) for move in moves], [at(place - move) for move in moves]
        both = at(place + moves.sum(0)) + at(place - moves.sum(0))
        # Differences over one step and over two: their errors, of the second order in the step, cancel.
        near = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
        far = [(at(place + 2 * move) - at(place - 2 * move)) / (4 * step) for move in moves]
        slope = torch.tensor([(4 * a - b) / 3 for a, b in zip(near, far, strict=True)], dtype=torch.float64)
        own = [(a + b - 2 * here) / step**2 for a, b in zip(ahead, behind, strict=True)]
        mixed = ((both - 2 * here) / step**2 - own[0] - own[1]) / 2
        values, vectors = torch.linalg.eigh(torch.tensor([[own[0], mixed], [mixed, own[1]]], dtype=torch.float64))
        # Against the curvature's size, whatever its sign: the step leads up where the function is not concave, too.
        direction = vectors @ ((vectors.T @ slope) / values.abs().clamp_min(1e-3))
        direction *= min(1.0, 2.0 / float(direction.abs().max().clamp_min(1e-300)))
        while float(direction.abs().max()) > SETTLED**2 and not at(place + direction) > here:
            direction = direction / 2
        if float(direction.abs().max()) <= SETTLED**2:
            break
        place = place + direction
    return math.exp(float(place[0])), math.exp(float(place[1]))


PLAIN_RULES: dict[str, Rule] = {
    "threshold": ConfidenceThreshold(),
    "nll": ValidationScore("nll"),
    "brier": ValidationScore("brier"),
    "ece": ValidationScore("ece"),
    "crps": ValidationScore("crps"),
    "evidence": Evidence(),
}
"""Rules for the prior precision that have a name."""
