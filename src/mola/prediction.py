"""What a predictor says about each input, or about each position of it: probabilities, and how much to trust them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mola.distributed import Team
from mola.errors import DataError
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network import without_autocast
from mola.options import counted
from mola.uncertainty import entropy

Later = Tensor | Callable[[], Tensor]
"""A field, or what computes it when it is first read."""


def later(compute: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What computes a field when it is first read, alike under any of torch's modes that are on then.

    Args:
        compute: gives the field.
        device: where it computes.

    Returns:
        What gives the field.
    """

    def computed() -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
            return compute()

    return computed


SIZES = "sizes"
"""Under which the sizes of a prediction's positions are told to other processes."""


class LazyFields:
    """Values by name about n inputs, some of which are computed when they are first read: a value that cannot be changed."""

    axes: ClassVar[dict[str, int | None]]
    """The names, and which axis of each is that of the inputs; None for what is the same for all of them."""
    likelihood: Likelihood
    """What it is about: one of C classes, yes or no for each of C labels, or numbers."""
    _values: dict[str, Any]
    _held: int

    def _keep(self, values: dict[str, Any], held: int, likelihood: Likelihood) -> None:
        # Keep the fields, and what computes the others; bytes that these keep in memory until they are computed.
        vars(self)["_values"] = values
        vars(self)["_held"] = held
        vars(self)["likelihood"] = likelihood

    def __setattr__(self, name: str, value: object) -> None:
        # Refuse: a prediction is a value.
        raise AttributeError(f"a {type(self).__name__} cannot be changed: {name}.")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def has(self, name: str) -> bool:
        """Whether there is such a field, computed or not."""
        return self._values[name] is not None

    def replaced(self, values: dict[str, Any], held: int) -> Self:
        """The same with other fields, or what computes them."""
        return self._of(self._values | values, held, self.likelihood)

    @property
    def axis(self) -> int:
        """Where classes, or outputs, stand behind the inputs: the last axis, or 1 in (n, C, H, W)."""
        found = self._values.get("axis")
        return -1 if found is None else found

    def _read(self, name: str) -> Any:
        # One dictionary entry is either of the two at any time: threads that read at once compute the same numbers.
        value = self._values[name]
        if callable(value):
            value = self._values[name] = value()
        return value

    def __getstate__(self) -> dict[str, Any]:
        # All fields, computed: a file holds numbers.
        values = {name: self._read(name) for name in self.axes}
        return {"_values": values, "_held": 0, "likelihood": self.likelihood}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Take the fields; those that an older version did not have are None.
        vars(self).update({"likelihood": CATEGORICAL, **state, "_values": dict.fromkeys(self.axes) | state["_values"]})

    @classmethod
    def _of(cls, values: dict[str, Any], held: int, likelihood: Likelihood) -> Self:
        made = cls.__new__(cls)
        made._keep(values, held, likelihood)
        return made

    @property
    def held(self) -> int:
        """Bytes that fields which were not read yet keep in memory: the features of the inputs, and what was made of them."""
        waiting = any(callable(value) for value in self._values.values())
        return self._held if waiting else 0

    def computed(self) -> Self:
        """The same prediction with every field computed now, and nothing kept for later."""
        for name in self.axes:
            self._read(name)
        return self

    def cpu(self) -> Self:
        """The same in main memory; what is not computed yet, once it is."""

        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.cpu()
            return (lambda: value().cpu()) if callable(value) else value

        return self._of({name: moved(self._values[name]) for name in self.axes}, self._held, self.likelihood)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Predictions of several batches as one. What they have not computed yet is computed when it is first read.

        Args:
            parts: at least one.

        Returns:
            All of them, in their order; `DataError` if they are of inputs of different sizes.
        """
        if len(parts) == 1:
            return parts[0]
        _check_sizes([part._sizes() for part in parts])

        def joined(name: str, axis: int | None) -> Any:
            values = [part._values[name] for part in parts]
            if axis is None or values[0] is None:
                return values[0]
            if any(callable(value) for value in values):
                # By part, so that a part is computed once, whoever asks. Of a part that has the field, nothing else is kept.
                waiting = [
                    partial(part._read, name) if callable(part._values[name]) else part._values[name] for part in parts
                ]
                return lambda: torch.cat([one() if callable(one) else one for one in waiting], dim=axis)
            return torch.cat(values, dim=axis)

        values, held = {name: joined(name, axis) for name, axis in cls.axes.items()}, sum(one.held for one in parts)
        return cls._of(values, held, parts[0].likelihood)

    @classmethod
    def gather(cls, parts: Sequence[Self], team: Team, likelihood: Likelihood = CATEGORICAL) -> Self:
        """Predictions of all processes as one, in the order of the ranks, on every rank. Call it inside `team.work(...)`.

        All fields are computed: processes meet now, and not when one of them reads.

        Args:
            parts: of this process; there may be none, if others have some.
            team: the processes.
            likelihood: what they are about.

        Returns:
            All predictions.
        """
        own = cls.concatenate(parts).computed() if parts else None
        kinds = team.collect(None if own is None else own._kind())
        kind = next((one for one in kinds or () if one is not None), None)
        if team.first and kind is None:
            raise DataError("the prediction loader is empty on every rank: it yielded no batch.")
        if team.first:
            _check_sizes([tuple(one[SIZES]) for one in kinds or () if one is not None])
        kind, values = team.share(kind), {}
        for name, axis in cls.axes.items():
            if axis is None or not kind[name]:
                values[name] = cls._common(name, kind[name])
                continue
            rows = None if own is None else own._read(name).transpose(0, axis)
            values[name] = team.rows(rows).transpose(0, axis)
        return cls._of(values, 0, likelihood)

    def _sizes(self) -> tuple[int, ...]:
        name, axis = next(iter(self.axes.items()))
        return tuple(self._values[name].shape[(axis or 0) + 1 :])

    def _kind(self) -> dict[str, Any]:
        # As JSON: whether each field of the inputs is there, and what is the same for all inputs.
        found: dict[str, Any] = {SIZES: self._sizes()}
        for name, axis in self.axes.items():
            value = self._read(name)
            same = value.tolist() if isinstance(value, Tensor) else value
            found[name] = same if axis is None else value is not None
        return found

    @classmethod
    def _common(cls, name: str, value: Any) -> Any:
        return value if cls.axes[name] is None else None


class Prediction(LazyFields):
    """Probabilities of n inputs over C classes, with their uncertainty taken apart.

    Of networks with outputs at many positions, everything is said of each: probabilities have the layout of the logits, (n, C, H, W)
    or (n, T, C), and what is (n,) below is (n, H, W) or (n, T).

    What is costly is computed when it is first read, and then kept: `mutual_information` (and `epistemic`, `aleatoric`),
    `ood_score`, `logit_variance` and `distance`. The numbers do not depend on when that is, nor on what is read before.

    Args:
        probs: (n, C).
        mutual_information: (n,), or what computes it.
        ood_score: (n,), or what computes it.
        ood_score_name: which score it is.
        logit_mean: (K, n, C), where the members have logits.
        logit_variance: (K, n, C), where they have, or what computes it.
        distance: (n,), where it is known, or what computes it.
        far_field: (n,), the far-field score, where it is known, or what computes it.
        held: bytes that fields keep in memory until they are computed.
        axis: of the classes in `probs`: the last, or 1.
        likelihood: what the probabilities are of.
    """

    axes: ClassVar[dict[str, int | None]] = {
        "probs": 0,
        "mutual_information": 0,
        "ood_score": 0,
        "ood_score_name": None,
        "logit_mean": 1,
        "logit_variance": 1,
        "distance": 0,
        "far_field": 0,
        "axis": None,
    }

    def __init__(
        self,
        probs: Tensor,
        mutual_information: Later,
        ood_score: Later,
        ood_score_name: str,
        logit_mean: Tensor | None = None,
        logit_variance: Later | None = None,
        distance: Later | None = None,
        far_field: Later | None = None,
        *,
        held: int = 0,
        axis: int = -1,
        likelihood: Likelihood = CATEGORICAL,
    ) -> None:
        values = (probs, mutual_information, ood_score, ood_score_name, logit_mean, logit_variance, distance, far_field)
        self._keep(dict(zip(self.axes, (*values, axis), strict=True)), held, likelihood)

    @property
    def probs(self) -> Tensor:
        """(n, C)."""
        return self._read("probs")

    @property
    def mutual_information(self) -> Tensor:
        """(n,): the epistemic part of the entropy, in nats."""
        return self._read("mutual_information")

    @property
    def ood_score(self) -> Tensor:
        """(n,): higher = more outlying."""
        return self._read("ood_score")

    @property
    def ood_score_name(self) -> str:
        """Which score it is: "far-field + energy + distance" for posteriors that were tuned on validation data.

        Without these, or without distances, "far-field"; without curvature, "max-probability".
        """
        return self._read("ood_score_name")

    @property
    def logit_mean(self) -> Tensor | None:
        """(K, n, C), where the members have logits."""
        return self._read("logit_mean")

    @property
    def logit_variance(self) -> Tensor | None:
        """(K, n, C), where the members have logits."""
        return self._read("logit_variance")

    @property
    def distance(self) -> Tensor | None:
        """How far (n,) the networks' features are from the training classes: 1 is the median of the validation data.

        A geometric mean over networks; before anything was tuned on validation data, 1 is the training data's root mean square.
        None where it is not known.
        """
        return self._read("distance")

    @property
    def far_field(self) -> Tensor | None:
        """The far-field score alone (n,): higher = more outlying. None where features are not known."""
        return self._read("far_field")

    @property
    def label(self) -> Tensor:
        """Most probable class (n,); for yes or no (n, C), 1 where the probability of yes is above one half."""
        return self._placed(self._answers.argmax(-1))

    @property
    def confidence(self) -> Tensor:
        """Probability of `label`: the largest of a class (n,); the larger one of yes and no (n, C)."""
        return self._placed(self._answers.amax(-1))

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty (n,) in nats: aleatoric and epistemic together; (n, C) for yes or no, as all of these."""
        return self._placed(entropy(self._answers))

    total = entropy

    @property
    def _answers(self) -> Tensor:
        # Probabilities (..., A) of all answers to each question.
        return self.likelihood.answer_probabilities(self.probs.movedim(self.axis, -1))

    def _placed(self, values: Tensor) -> Tensor:
        # What was made of the answers: where each label has its own, labels stand as in `probs`.
        return values if self.likelihood.competing else values.movedim(-1, self.axis)

    @property
    def epistemic(self) -> Tensor:
        """What more data would remove (n,): the mutual information."""
        return self.mutual_information

    @property
    def aleatoric(self) -> Tensor:
        """What no data would remove (n,)."""
        return self.entropy - self.mutual_information

    def __len__(self) -> int:
        return len(self.probs)

    def __repr__(self) -> str:
        count, outputs = len(self), self.probs.shape[self.axis]
        sizes = self.probs.movedim(self.axis, -1).shape[1:-1]
        at = f" at {' x '.join(map(str, sizes))} positions" if sizes else ""
        classes = f"{outputs} classes" if self.likelihood.competing else counted(outputs, "label")
        if not self.probs.numel():
            return f"Prediction({count} inputs{at}, {classes})"
        return (
            f"Prediction({count} inputs{at}, {classes}, mean confidence {float(self.confidence.mean()):.3f}, "
            f"mean entropy {float(self.entropy.mean()):.3f} of which epistemic {float(self.epistemic.mean()):.3f})"
        )


def _check_sizes(shapes: Sequence[tuple[int, ...]]) -> None:
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is not None:
        raise DataError(
            f"predictions of different sizes cannot be joined: those of one batch have the sizes {shapes[0]} after the batch axis, "
            f"those of another {other}. Predict batch by batch with posterior.predict_batches(loader), or pad the inputs to one size."
        )
