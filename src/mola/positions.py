"""Predictions at many positions of each input: made of a few thousand rows at a time, and put back in the layout of the logits.

A batch of images has millions of positions, and a link may need C x C numbers for each. So moments are made for a portion of the
positions, what is wanted of them is written to its place, and nothing else is kept. Fields of a prediction that are computed when
they are first read go through the portions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from mola.component import Component
from mola.errors import DataError, located
from mola.laplace import LogitMoments, in_range
from mola.network import DenseFeatures, Layout, Portion, check_finite
from mola.prediction import Later, Prediction, later

__all__ = ["DenseBatch"]

ROWS_AT_ONCE = 2**14
"""Positions whose predictions are made together, for few classes."""

LOGITS_AT_ONCE = 2**19
"""Their logits, for many: what leaves the processor's cache takes several times as long."""

LATER = ("mutual_information", "ood_score", "logit_variance", "distance", "far_field")
"""Fields of a prediction that are computed when they are first read."""

RowPrediction = Callable[[list[LogitMoments]], Prediction]
"""What makes a prediction of rows."""


@dataclass(frozen=True)
class DenseBatch:
    """What the networks of a mixture make of one batch at many positions."""

    components: Sequence[Component]
    seen: Sequence[DenseFeatures]

    @staticmethod
    def of(pairs: Sequence[tuple[Component, DenseFeatures]], others: int = 0) -> DenseBatch:
        """See that the networks' outputs are at the same positions, and finite.

        Args:
            pairs: components, and what their networks make of the batch.
            others: number of networks whose outputs are not at many positions.

        Returns:
            The batch.

        Raises:
            DataError: if they are not.
        """
        if others:
            message = (
                "some networks have outputs at many positions and others do not; a mixture needs the same from each."
            )
            raise DataError(message)
        components, seen = [one for one, _ in pairs], [one for _, one in pairs]
        classes = [one.logits.shape[-1] for one in seen]
        if len(set(classes)) > 1:
            message = f"expected networks with the same number of classes, got {classes}."
            raise DataError(message)
        for index, one in enumerate(seen):
            seen[0].layout.check_same(one.layout, f"models[{index}]")
            with located(f"models[{index}]"):
                check_finite(one.logits)
        return DenseBatch(components, seen)

    @property
    def layout(self) -> Layout:
        """Of the first network's outputs."""
        return self.seen[0].layout

    @property
    def classes(self) -> int:
        """Number of outputs C."""
        return self.seen[0].logits.shape[-1]

    def portions(self) -> Iterator[tuple[Portion, list[LogitMoments]]]:
        """Moments of all positions, some at a time.

        Yields:
            Which positions, and the moments under each component; of no positions, one portion without any.
        """
        rows, layout = max(1, min(ROWS_AT_ONCE, LOGITS_AT_ONCE // self.classes)), self.layout
        for part in layout.portions(rows) if layout.rows else [Portion(slice(0, 0), slice(0, layout.count))]:
            pairs = zip(self.components, self.seen, strict=True)
            yield part, in_range([component.moments_of(one.rows(part)) for component, one in pairs])

    def gather(self, of: Callable[[list[LogitMoments]], Sequence[Tensor]]) -> list[Tensor]:
        """What is made of each position, in its place.

        Args:
            of: makes tensors of the moments of some rows: (rows,), (rows, C), or (K, rows, C).

        Returns:
            (n, H, W), (n, C, H, W), or (K, n, C, H, W) for each of them, where classes stand as in the logits.
        """
        made: list[Tensor] = []
        for part, moments in self.portions():
            found = of(moments)
            made = made or [self._room(values) for values in found]
            for values, place in zip(found, made, strict=True):
                self._put(values, part, place)
        return made

    def _room(self, like: Tensor) -> Tensor:
        layout = self.layout
        shape = (layout.inputs, *layout.sizes) if like.dim() == 1 else layout.shape(like.shape[-1])
        return like.new_empty(*like.shape[:-2], *shape)

    def _put(self, rows: Tensor, part: Portion, place: Tensor) -> None:
        """Write rows to their positions."""
        if rows.dim() == 3:
            for own, there in zip(rows, place, strict=True):
                self._put(own, part, there)
            return
        there = place.flatten(1) if rows.dim() == 1 else self.layout.by_position(place)
        sizes = [one.stop - one.start for one in part]
        there[part.inputs, part.positions] = rows.view(*sizes, *rows.shape[1:])

    def prediction(self, of: RowPrediction) -> Prediction:
        """The prediction of the batch.

        Args:
            of: makes a prediction of the moments of some rows.

        Returns:
            Probabilities now; what is costly is computed when it is first read.
        """
        fields: list[Prediction] = []

        def first(moments: list[LogitMoments]) -> tuple[Tensor, Tensor]:
            found = of(moments)
            fields[:] = [found]
            assert found.logit_mean is not None  # networks have logits
            return found.probs, found.logit_mean

        probs, means = self.gather(first)
        like, kept = fields[0], self._kept(means)

        def field(name: str) -> Later | None:
            if not like.has(name):
                return None
            return later(lambda: kept.gather(lambda moments: [of(moments).read(name)])[0], probs.device)

        return like.replaced(
            {"probs": probs, "logit_mean": means} | {name: field(name) for name in LATER},
            held=probs.nbytes + means.nbytes + sum(one.features.nbytes for one in kept.seen),
            axis=self.layout.axis,
        )

    def _kept(self, means: Tensor) -> DenseBatch:
        """The same for later, in memory of its own: a network may use its memory again for the next batch."""
        layout = self.layout
        pairs = zip(self.seen, means, strict=True)
        seen = [DenseFeatures(one.features.clone(), layout.by_position(mean), layout) for one, mean in pairs]
        return DenseBatch(self.components, seen)
