"""Predictions at many positions of each input: made of a few thousand rows at a time, and put back in the layout of the logits.

A batch of images has millions of positions, and a link may need C x C numbers for each. So moments are made for a portion of the
positions, what is wanted of them is written to its place, and nothing else is kept. Fields of a prediction that are computed when
they are first read go through the portions again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from mola.component import Component
from mola.errors import DataError, located
from mola.laplace import LogitMoments, in_range
from mola.network import DenseFeatures, Layout, Portion, check_finite
from mola.prediction import Later, LazyFields, later

ROWS_AT_ONCE = 2**14
"""Positions whose predictions are made together, for few classes."""

LOGITS_AT_ONCE = 2**19
"""Their logits, for many: what leaves the processor's cache takes several times as long."""

Kind = TypeVar("Kind", bound=LazyFields)
"""Of prediction."""


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
        """
        if others:
            raise DataError(
                "some networks have outputs at many positions and others do not; a mixture needs the same from each."
            )
        components, seen = [one for one, _ in pairs], [one for _, one in pairs]
        classes = [one.logits.shape[-1] for one in seen]
        if len(set(classes)) > 1:
            raise DataError(f"expected networks with the same number of classes, got {classes}.")
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
        if rows.dim() == 3:
            for own, there in zip(rows, place, strict=True):
                self._put(own, part, there)
            return
        there = place.flatten(1) if rows.dim() == 1 else self.layout.by_position(place)
        sizes = [one.stop - one.start for one in part]
        there[part.inputs, part.positions] = rows.view(*sizes, *rows.shape[1:])

    def prediction(self, of: Callable[[list[LogitMoments]], Kind]) -> Kind:
        """The prediction of the batch.

        Args:
            of: makes a prediction of the moments of some rows.

        Returns:
            What is known of rows at once, now; what is costly is computed when it is first read.
        """
        found: list[Kind] = []

        def known(one: LazyFields) -> list[str]:
            return [
                name for name, axis in one.axes.items() if axis is not None and isinstance(one._values[name], Tensor)
            ]

        def first(moments: list[LogitMoments]) -> list[Tensor]:
            found[:] = [of(moments)]
            return [found[0]._read(name) for name in known(found[0])]

        made, like, kept = self.gather(first), found[0], self._kept()
        values: dict[str, Any] = dict(zip(known(like), made, strict=True))

        def field(name: str) -> Later:
            return later(lambda: kept.gather(lambda moments: [of(moments)._read(name)])[0], made[0].device)

        values |= {name: field(name) for name, value in like._values.items() if callable(value)}
        held = sum(one.nbytes for one in made) + sum(one.features.nbytes + one.logits.nbytes for one in kept.seen)
        return like.replaced(values | {"axis": self.layout.axis}, held)

    def _kept(self) -> DenseBatch:
        # The same for later, in memory of its own: a network may use its memory again for the next batch.
        seen = [DenseFeatures(one.features.clone(), one.logits.clone(), one.layout) for one in self.seen]
        return DenseBatch(self.components, seen)
