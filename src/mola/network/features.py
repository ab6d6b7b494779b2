"""Stream features: a loader is read once by all networks together, and what each head received is captured.

Small batches are gathered, so that they are copied, checked and summed together; if a check fails, the batch is named. Rows are
written into memory that is used again, since allocating new memory took longer than copying into it.

Networks with outputs at many positions give `DenseFeatures`. They are never copied as a whole: `stream` turns them into rows, a few
thousand positions at a time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from mola.errors import DataError, HeadError, located
from mola.likelihood import CATEGORICAL, Likelihood
from mola.network.calling import Inputs, as_batch, call, device_of
from mola.network.head import Carried, Head, LayerCall, first_pass
from mola.network.layout import IGNORED, Layout, Portion, chosen_positions
from mola.numerics import exact_device


class Features(NamedTuple):
    """What one network makes of one batch: the head's input and output, in the network's precision."""

    features: Tensor
    """(n, P): input of the head; of `Lifted` rows, with the constant 1."""
    logits: Tensor
    """(n, C): output of the network."""


class DenseFeatures(NamedTuple):
    """What one network with outputs at many positions makes of one batch."""

    features: Tensor
    """(n, positions, P): input of the head."""
    logits: Tensor
    """(n, positions, C): output of the network."""
    layout: Layout

    @staticmethod
    def of(features: Tensor | None, outputs: Tensor, axis: int) -> DenseFeatures:
        """Input, if there is a head, and output of a network, whose classes stand at an axis: views of them."""
        layout = Layout.of(outputs, axis)
        logits = layout.by_position(outputs)
        return DenseFeatures(logits[..., :0] if features is None else layout.by_position(features), logits, layout)

    def rows(self, part: Portion) -> Features:
        """Some of the positions of some of the inputs, as rows."""
        features, logits = (values[part.inputs, part.positions].flatten(0, 1) for values in self[:2])
        return Features(features, logits)

    def chosen(self, index: int, positions: Tensor) -> Features:
        """Some positions of one input, as rows."""
        return Features(*(values[index].index_select(0, positions.to(values.device)) for values in self[:2]))

    def all_rows(self) -> Features:
        """Every position of every input, as rows: copies, mostly."""
        return Features(self.features.flatten(0, 1), self.logits.flatten(0, 1))


Seen = Features | DenseFeatures
"""What one network makes of one batch."""


def seen_by(head: Head, features: Tensor, outputs: Tensor) -> Seen:
    """Input and output of a head as rows, or as they stand at many positions."""
    return Features(features, outputs) if head.positions is None else DenseFeatures.of(features, outputs, head.axis)


class Watched:
    """A network whose head is watched: every pass gives the logits and what the head saw.

    A context: the hook is on the head inside, and is removed afterwards, whatever happens. Use it inside
    `undisturbed(network)`.

    Args:
        network: the trained classifier.
        head: its last linear layer, or None where the logits are all that is wanted.
        likelihood: what the outputs mean; refuses those that do not fit.
    """

    def __init__(self, network: nn.Module, head: Head | None, likelihood: Likelihood = CATEGORICAL) -> None:
        self.network, self.head, self.likelihood = network, head, likelihood
        self.device = device_of(network)
        self._calls: list[LayerCall] | None = None
        self._carried = Carried(head) if head is not None and head.every_position else None

    def __enter__(self) -> Self:
        self._handle = None
        if self._carried is not None:
            self._carried.__enter__()
        elif self.head is not None:
            self._handle = self.head.layer.register_forward_hook(self._keep, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._carried is not None:
            self._carried.__exit__()
        elif self._handle is not None:
            self._handle.remove()

    def _keep(self, _: nn.Module, arguments: tuple[Tensor, ...], *rest: Any) -> None:
        # For a moment, as this hook comes or goes in one thread, torch calls it without keywords in another.
        *keywords, output = rest
        if self._calls is not None:  # else somebody else runs the network between two passes
            self._calls.append(LayerCall.of(arguments, keywords[0] if keywords else {}, output))

    def __call__(self, inputs: Inputs) -> Seen:
        """One forward pass."""
        if self._carried is not None:
            return Features(*self._carried.apart(self._carried.pass_of(self.network, inputs, self.device)))
        calls: list[LayerCall] = []
        self._calls = calls
        try:
            logits = call(self.network, inputs, self.device)
        finally:
            self._calls = None
        if self.head is None and logits.dim() > 2:
            return self._without_head(logits, inputs)
        flat = logits.dim() == 1
        axes = 0 if self.head is None or self.head.positions is None else self.head.positions.axes
        if self.head is None:
            logits = self._rows(logits, lambda: first_pass(self.network, inputs, None, self.likelihood))
            return Features(logits[:, :0], logits)
        if logits.dim() != 2 + axes:
            logits = self._rows(logits, lambda: None)
        for seen in reversed(calls):
            # In a trace nothing has an address: (n,) is then taken to be the head's (n, 1), as it was when the head was found.
            if seen.gave(logits) or (flat and torch.compiler.is_compiling()):
                seen.check_untouched(self.head.name)
                return seen_by(self.head, seen.features, logits)
        raise HeadError(
            f"the network's output is not the output of its head {self.head.name!r} in this pass. Was the network changed?"
        )

    def _rows(self, outputs: Tensor, check: Callable[[], object]) -> Tensor:
        try:
            return self.likelihood.check_outputs(outputs)
        except HeadError:
            # Logits, too, may all lie between 0 and 1: those that a linear layer gave are logits.
            with suppress(HeadError, DataError):
                check()
                return self.likelihood.check_outputs(outputs, [("", outputs.shape)])
            raise

    def _without_head(self, outputs: Tensor, inputs: Inputs) -> DenseFeatures:
        # Outputs at many positions of a network of which no head is known: the layer that gave them says where classes
        # stand.
        known, axis = _class_axes.get(id(self.network), (None, 0))
        if known is None or known() is not self.network:
            axis = first_pass(self.network, inputs, None, self.likelihood)[0].axis
            _class_axes[id(self.network)] = (weakref.ref(self.network), axis)
        return DenseFeatures.of(None, outputs, axis)


_class_axes: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
"""Where classes stand in the outputs of networks of which no head is known, by identity, as their first pass showed it."""


def capture(network: nn.Module, head: Head | None, inputs: Inputs, likelihood: Likelihood = CATEGORICAL) -> Seen:
    """What a network and its head make of one batch; see `Watched`."""
    with Watched(network, head, likelihood) as watched:
        return watched(inputs)


def find_heads(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    inputs: Inputs,
    likelihood: Likelihood = CATEGORICAL,
) -> list[Head]:
    """The head of every network; see `first_passes`."""
    return first_passes(networks, names, inputs, likelihood)[0]


def first_passes(
    networks: Sequence[nn.Module],
    names: Sequence[str | None],
    inputs: Inputs,
    likelihood: Likelihood = CATEGORICAL,
) -> tuple[list[Head], list[Seen]]:
    """The head of every network, and what each makes of the first batch. Call it inside `undisturbed(*networks)`.

    Args:
        networks: the trained classifiers.
        names: for each, the dotted name of its head, or None to find it.
        inputs: one batch of inputs.
        likelihood: what the outputs mean; refuses those that do not fit.

    Returns:
        One head, and what each network makes of the batch.
    """
    heads: list[Head] = []
    seen: list[Seen] = []
    for index, (network, name) in enumerate(zip(networks, names, strict=True)):
        with located(f"models[{index}] ({type(network).__name__})"):
            head, features, logits = first_pass(network, inputs, name, likelihood)
        heads.append(head)
        seen.append(seen_by(head, features, logits))
    classes = [head.classes for head in heads]
    if len(set(classes)) > 1:
        raise HeadError(
            f"expected networks with the same number of classes, got {classes}. A mixture averages their probabilities."
        )
    axes = [0 if head.positions is None else head.positions.axes for head in heads]
    if len(set(axes)) > 1:
        raise HeadError(f"expected networks with outputs of one kind, got outputs with {axes} axes of positions.")
    return heads, seen


ALIGNED = 8
"""Rows begin at multiples of 64 bytes: products of rows of 257 numbers took a third longer."""

ROWS = 4096
"""For which there is memory from the start; more is allocated as they come."""


class Lifted(Features):
    """Features with the constant 1 (n, P) and logits (n, C), until the next are put in their place."""

    __slots__ = ()


def device_of_sums(seen: Seen) -> torch.device:
    """Where float64 sums over these rows are made: on the CPU where the network's device has no float64."""
    return exact_device(seen.logits.device)


class RowBuffer:
    """What one network made of some data.

    Args:
        head: which sees the features.
        rows: how many rows to allocate memory for.
        exact: whether to keep them in float64, where sums are made of them; or as they are.
    """

    def __init__(self, head: Head, rows: int, *, exact: bool = True) -> None:
        self.head, self.rows, self.exact, self._bias = head, rows, exact, head.has_bias
        self._kept: Lifted | None = None
        self._form: tuple[object, ...] = ()
        self._ones = 0

    def put(self, seen: Features, start: int = 0) -> Lifted:
        """Copy rows there.

        Args:
            seen: input and output of the head, on any device and in any precision.
            start: row to begin at; those before it stay.

        Returns:
            The copies, as views.
        """
        given, outputs, kept = seen.features.detach(), seen.logits.detach(), self._kept
        count, width = given.shape
        # This is paid at every batch, and all the Python in it takes longer than the copies of a small one.
        form = (width, outputs.shape[1], given.device, outputs.device, given.dtype, outputs.dtype)
        if kept is None or form != self._form or start + count > kept.logits.shape[0]:
            kept, self._form = self._room_for(seen, start, start + count), form
        features, logits = kept.features.narrow(0, start, count), kept.logits.narrow(0, start, count)
        # First to the device, then to float64: a device that has none cannot convert on the way.
        features.narrow(1, 0, width).copy_(given.to(features.device))
        logits.copy_(outputs.to(logits.device))
        if self._bias and start + count > self._ones:
            kept.features.select(1, width).fill_(1)
            self._ones = kept.logits.shape[0]
        return Lifted(features, logits)

    def handed_out(self) -> None:
        """Note that somebody has the rows now, and may write into them: the constant 1 is then written anew."""
        self._ones = 0

    def first(self, count: int) -> Lifted:
        """The first rows that were put there."""
        if self._kept is None or len(self._kept.logits) < count:
            raise IndexError(f"{count} rows were not put here")
        return Lifted(self._kept.features[:count], self._kept.logits[:count])

    def _room_for(self, seen: Features, start: int, end: int) -> Lifted:
        device = device_of_sums(seen) if self.exact else seen.logits.device
        width, outputs = seen.features.shape[1] + self.head.has_bias, seen.logits.shape[1]
        had = self._kept
        if had is not None and (had.features.shape[1], had.logits.shape[1]) != (width, outputs):
            raise DataError(
                f"head {self.head.name!r} saw {width - self.head.has_bias} features and gave {outputs} outputs, after "
                f"{had.features.shape[1] - self.head.has_bias} and {had.logits.shape[1]} in the batches before."
            )
        kinds = [values.dtype for values in seen]
        if self.exact:
            kinds = [torch.float64, torch.float64]
        elif had is not None and start > 0:  # what is there stays, in a type that holds both
            kinds = [torch.promote_types(kind, values.dtype) for kind, values in zip(kinds, had, strict=True)]
        known = had is not None and [had.logits.device, had.features.dtype, had.logits.dtype] == [device, *kinds]
        if had is None or len(had.logits) < end or not known:
            rows = max(end, min(self.rows, max(ROWS, 2 * end)))
            features = torch.empty(rows, -(-width // ALIGNED) * ALIGNED, dtype=kinds[0], device=device)
            logits = torch.empty(rows, outputs, dtype=kinds[1], device=device)
            self._kept = Lifted(features[:, :width], logits)
            if had is not None:
                self._kept.features[:start].copy_(had.features[:start])
                self._kept.logits[:start].copy_(had.logits[:start])
            had, self._ones = self._kept, 0
        return had


class Waiting(NamedTuple):
    """One batch that waits."""

    place: str
    """Words for the error message."""
    seen: Sequence[Features]
    """What each network makes of it."""
    labels: Tensor | None
    """As the loader yielded them."""

    def __len__(self) -> int:
        return len(self.seen[0].logits)


class Gathered:
    """What K networks make of the batches that wait to be used together.

    Args:
        rows: how many to gather. A batch of so many, or more, is taken as it is.
        heads: the networks' last layers; without one, nothing is gathered.
        likelihood: what the outputs mean; reads the labels.
        exact: whether what is gathered comes in float64.
    """

    def __init__(self, rows: int, heads: Sequence[Head | None], likelihood: Likelihood, *, exact: bool = True) -> None:
        self._buffers = [RowBuffer(head, rows, exact=exact) for head in heads if head is not None]
        self.rows, self.likelihood = rows if len(self._buffers) == len(heads) else 1, likelihood
        self.count, self.ended = 0, (0, 0, 0)
        self._waiting: list[Waiting] = []

    @property
    def full(self) -> bool:
        """Whether it is time to take what was gathered."""
        return self.count >= self.rows

    def finish(self, used_inputs: int, inputs: int) -> None:
        """Note that all of a batch of the loader was added, of how many inputs there were rows, and how many inputs it had."""
        batches, used, every = self.ended
        self.ended = batches + 1, used + used_inputs, every + inputs

    def fits(self, count: int) -> bool:
        """Whether a batch of so many rows may join. One without rows always may: what is told of a batch goes with its last rows."""
        return count == 0 or self.count == 0 or self.count + count <= self.rows

    def add(self, place: str, seen: Sequence[Features], labels: Tensor | None) -> None:
        """Take one more batch.

        Args:
            place: words for the error message.
            seen: what each network makes of it.
            labels: as the loader yielded them.
        """
        counts = [one.logits.shape[0] for one in seen]
        if len(set(counts)) > 1:
            raise DataError(f"{place}: the networks gave {counts} rows; a mixture needs the same data from each.")
        if counts[0] == 0:  # such as a text of which every position is masked
            return
        if counts[0] < self.rows:
            # A network or a loader may use its memory again for the next batch, or features be a part of something large.
            try:
                seen = [buffer.put(one, self.count) for buffer, one in zip(self._buffers, seen, strict=True)]
            except DataError:
                with located(place):
                    raise
            labels = None if labels is None else labels.clone()
        self._waiting.append(Waiting(place, seen, labels))
        self.count += counts[0]

    @torch.no_grad()
    def take(self) -> tuple[list[Features], Tensor | None]:
        """All that was gathered, checked; the next batch that is added overwrites it."""
        waiting, count = self._waiting, self.count
        self._waiting, self.count, self.ended = [], 0, (0, 0, 0)
        for buffer in self._buffers:
            buffer.handed_out()
        joined: list[Features] = list(waiting[0].seen)
        if len(waiting) > 1:
            joined = [buffer.first(count) for buffer in self._buffers]
        if not all(all_finite(one.logits) for one in joined):  # what is wrong with the features shows in the logits
            self._check_each(waiting)
        return joined, self._labels(waiting, joined[0].logits)

    def _labels(self, waiting: Sequence[Waiting], logits: Tensor) -> Tensor | None:
        parts = [batch.labels for batch in waiting if batch.labels is not None]
        if not parts:
            return None
        kinds = {(labels.dtype, labels.device, labels.shape[1:]) for labels in parts}
        if len(kinds) == 1 and [labels.shape[:1] for labels in parts] == [(len(batch),) for batch in waiting]:
            try:
                return self.likelihood.check_labels(torch.cat(parts), logits, waiting[0].place)
            except DataError:
                pass  # the batch that is to blame is found below
        return torch.cat(self._check_each(waiting))

    def _check_each(self, waiting: Sequence[Waiting]) -> list[Tensor]:
        # Check batch by batch, so that the message names it; gives the labels as the likelihood reads them.
        read = []
        for place, seen, labels in waiting:
            for position, one in enumerate(seen):
                with located(f"{place}, models[{position}]"):
                    check_finite(one.features, "features")
                    check_finite(one.logits)
            if labels is not None:
                read.append(self.likelihood.check_labels(labels, seen[0].logits, place))
        return read


def all_finite(values: Tensor) -> bool:
    """Whether all are finite, in all but one small operation: NaN and infinity survive in a sum."""
    return math.isfinite(float(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))))


def check_finite(values: Tensor, name: str = "logits") -> None:
    """Refuse activations that are NaN or infinite.

    Args:
        values: (n, ...); not looked at in a trace, which has no numbers.
        name: what they are, for the message.
    """
    if torch.compiler.is_compiling() or all_finite(values):
        return
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        rows = int((~finite).any(1).sum())
        raise DataError(
            f"{name} are NaN or infinite for {rows} of {len(values)} inputs. Check the inputs, and the network's weights, for NaN; "
            f"a network in float16 may overflow where bfloat16 or float32 does not."
        )


def check_loader(loader: Iterable[Any], where: str) -> None:
    """Refuse what cannot be a loader, without reading from it.

    Args:
        loader: any iterable of batches, also one that can be read only once.
        where: words for the error message.
    """
    is_batch = isinstance(loader, tuple) and all(isinstance(part, Tensor) for part in loader)
    if isinstance(loader, (Tensor, Mapping)) or is_batch or not isinstance(loader, Iterable):
        raise DataError(
            f"{where}: expected an iterable of batches, got {type(loader).__name__}. "
            f"Pass a DataLoader, or a single batch in a list: [(x, y)]."
        )


def batches_of(loader: Iterable[Any], where: str) -> Iterator[Any]:
    """An iterator over the batches of a loader, of which there may be none.

    Args:
        loader: any iterable of batches, also one that can be read only once.
        where: words for the error message.

    Returns:
        The iterator; `DataError` if this is not an iterable of batches.
    """
    check_loader(loader, where)
    return iter(loader)


def peek(loader: Iterable[Any], where: str) -> tuple[Any, Iterator[Any]]:
    """The first batch, and an iterator over all of them, the first included.

    Args:
        loader: any iterable of batches, also one that can be read only once.
        where: words for the error message.

    Returns:
        The first batch and an iterator over every batch.
    """
    batches = batches_of(loader, where)
    for first in batches:

        def every(first: Any = first) -> Iterator[Any]:
            yield first
            yield from batches

        return first, every()
    raise DataError(
        f"{where} is empty: it yielded no batch. An iterator that was read before has nothing left; pass the loader itself."
    )


def batch_count(loader: Iterable[Any]) -> int | None:
    """How many batches a loader will yield, where it knows."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None


class BatchRows(NamedTuple):
    """One batch as rows, piece by piece."""

    pieces: Iterator[tuple[Sequence[Features], Tensor | None]]
    """What each network makes of some rows, and their labels."""
    most_rows: int
    """How many rows there may be."""
    used_inputs: int
    """How many inputs there are rows of."""
    inputs: int
    """How many inputs there are."""


def _read(
    place: str,
    seen: Sequence[Seen],
    labels: Tensor | None,
    heads: Sequence[Head | None],
    rows: int,
    most: int | None,
    start_input: int,
    likelihood: Likelihood,
) -> BatchRows:
    # The batch in pieces of at most so many rows: in one, if the networks gave rows. `most` positions of each input are
    # drawn; None: all are taken.
    plain = [one for one in seen if isinstance(one, Features)]
    if len(plain) == len(seen):
        count = len(plain[0].logits)
        return BatchRows(iter([(plain, labels)]), count, count, count)
    dense = [one for one in seen if isinstance(one, DenseFeatures)]
    if len(dense) < len(seen):
        raise DataError(
            f"{place}: some networks have outputs at many positions and others do not; a mixture needs the same from each."
        )
    layout, outputs = dense[0].layout, dense[0].logits.shape[-1]
    for index, one in enumerate(dense[1:], 1):
        layout.check_same(one.layout, f"{place}: models[{index}]")
    given = None if labels is None else layout.labels(labels, likelihood.latent(outputs), place)
    head = heads[0]
    ignored = IGNORED if head is None or head.positions is None else head.positions.ignore_index
    used = None
    if given is not None:
        used = given != ignored
        if used.dim() == 3:
            given, used = _partly_labelled(given, used, likelihood, place), used.any(2)
    inputs = layout.inputs if used is None else int(used.any(1).sum())
    if most is None:
        pieces = _all_positions(dense, given, used, max(rows, ROWS) if rows == 1 else rows)
        return BatchRows(pieces, layout.rows, inputs, layout.inputs)
    pieces = _some_positions(dense, given, used, most, start_input)
    return BatchRows(pieces, layout.inputs * min(most, layout.count), inputs, layout.inputs)


def _partly_labelled(labels: Tensor, used: Tensor, likelihood: Likelihood, place: str) -> Tensor:
    # Labels (n, positions, C), of which some of a position's may be left out.
    partly = used.any(2) & ~used.all(2)
    if not bool(partly.any()):
        return labels
    if not likelihood.partial:
        raise DataError(
            f"{place}: at {int(partly.sum())} positions some of the {labels.shape[2]} targets have the label that is left out, and "
            f"others do not. Give all targets of a position, or leave out all of them."
        )
    return torch.where(used, labels.double(), torch.nan)


def _all_positions(
    seen: Sequence[DenseFeatures], labels: Tensor | None, used: Tensor | None, rows: int
) -> Iterator[tuple[Sequence[Features], Tensor | None]]:
    if used is not None and bool(used.all()):
        used = None
    for part in seen[0].layout.portions(rows):
        pieces = [one.rows(part) for one in seen]
        own = None if labels is None else labels[part.inputs, part.positions].flatten(0, 1)
        if used is not None and own is not None:
            which = used[part.inputs, part.positions].flatten().nonzero().squeeze(1)
            if len(which) < len(own):
                own = own[which]
                pieces = [Features(*(values[which.to(values.device)] for values in one)) for one in pieces]
        yield pieces, own


def _some_positions(
    seen: Sequence[DenseFeatures], labels: Tensor | None, used: Tensor | None, most: int, start_input: int
) -> Iterator[tuple[Sequence[Features], Tensor | None]]:
    layout = seen[0].layout
    for index in range(layout.inputs):
        if used is None:
            which = chosen_positions(layout.count, most, start_input + index)
        else:
            known = used[index].cpu().nonzero().squeeze(1)
            which = known[chosen_positions(len(known), most, start_input + index)]
        pieces = [one.chosen(index, which) for one in seen]
        yield pieces, None if labels is None else labels[index][which.to(labels.device)]


def stream(
    networks: Sequence[nn.Module],
    heads: Sequence[Head | None],
    loader: Iterable[Any],
    *,
    where: str,
    progress: bool,
    total: int | None = None,
    labelled: bool = False,
    likelihood: Likelihood = CATEGORICAL,
    rows: int = 1,
    exact: bool = True,
    first: Sequence[Seen] | None = None,
    start: int = 0,
    told: Callable[[int, int, int], None] = lambda batches, used_inputs, inputs: None,
    positions: int | None = None,
    start_input: int = 0,
) -> Iterator[tuple[list[Features], Tensor | None]]:
    """Read the loader once and yield what every network makes of it.

    All networks see each batch before the next is read, so data are loaded once for K networks and an iterator that can
    be read only once will do. Call it inside `undisturbed(*networks)`.

    Args:
        networks: the trained classifiers.
        heads: their last linear layers.
        loader: any iterable of batches.
        where: what the loader is for, as in "training loader"; used in messages and on the progress bar.
        progress: whether to show a progress bar on stderr, if that is a terminal.
        total: number of batches, for the progress bar.
        labelled: whether every batch must carry labels.
        likelihood: what the outputs mean; reads the labels.
        rows: batches smaller than this are gathered and come together, as long as they stay below it, with the constant 1, until
            the next are asked for; larger ones come as they are. What is done with them, checks included, is then paid more rarely.
        exact: whether what is gathered comes in float64; or in the networks' own precision.
        first: what the networks make of the first batch, where that is known: they are not run on it again.
        start: number of batches of the loader that were read before.
        told: told of what is about to be yielded how many batches end there, how many inputs they have rows of, and how many inputs.
        positions: of outputs at many positions, so many of each input, drawn at random; None: all.
        start_input: number of inputs in the batches that were read before: which positions are drawn depends on it.

    Yields:
        One `Features` for each network, and the labels as the likelihood reads them, or None.
    """
    _, batches = peek(loader, f"the {where}")
    had_labels: bool | None = None
    gathered, any_rows = Gathered(rows, heads, likelihood, exact=exact), start > 0

    def take() -> tuple[list[Features], Tensor | None]:
        nonlocal any_rows
        any_rows = True
        told(*gathered.ended)
        return gathered.take()

    with ExitStack() as stack:
        pairs = zip(networks, heads, strict=True)
        watched = [stack.enter_context(Watched(network, head, likelihood)) for network, head in pairs]
        bar = stack.enter_context(
            tqdm(batches, desc=where, total=total, initial=start, disable=None if progress else True, leave=False)
        )
        for index, raw in enumerate(bar, start):
            place = f"batch {index} of the {where}"
            batch = as_batch(raw, place)
            if batch.labels is None and labelled:
                raise DataError(f"{place} has no labels. Yield (inputs, labels), or a mapping with 'labels'.")
            if had_labels is not None and had_labels != (batch.labels is not None):
                raise DataError(f"{place} {'has no' if had_labels else 'has'} labels, unlike the batches before it.")
            had_labels = batch.labels is not None
            seen: list[Seen] = []
            if first is not None:
                seen, first = list(first), None
            else:
                try:
                    for network in watched:
                        seen.append(network(batch.inputs))
                except (DataError, HeadError):
                    with located(f"{place}, models[{len(seen)}]"):
                        raise
            read = _read(place, seen, batch.labels, heads, rows, positions, start_input, likelihood)
            start_input += read.inputs
            del seen, batch, raw  # not kept while the next is made
            # A batch that comes in pieces shares no turn with those before it: so much of the data is always whole batches.
            if not gathered.fits(read.most_rows):
                yield take()
            for some, labels in read.pieces:
                if not gathered.fits(len(some[0].logits)):
                    yield take()
                gathered.add(place, some, labels)
                del some, labels
            gathered.finish(read.used_inputs, read.inputs)
            del read
            if gathered.full:
                yield take()
    if gathered.count:
        yield take()
    if not any_rows:
        raise DataError(f"the {where}: the networks gave no row for any batch. Is every position masked?")
