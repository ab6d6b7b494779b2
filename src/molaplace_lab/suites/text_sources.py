"""Sources of texts that fit in memory, as rows of features or of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from molaplace.demo import LabelledData
from molaplace.evaluation import Role
from molaplace_lab.checksums import checksum
from molaplace_lab.suite import Batches, Source


def text_source(
    name: str, title: str, role: Role, rows: LabelledData, *, batch_size: int = 256, level: float = 0.0
) -> Source:
    """Create a source of texts; row i of the data is text i."""

    def read(indices: Sequence[int]) -> Batches:
        return LabelledData(rows.inputs[list(indices)], rows.labels[list(indices)]).batches(batch_size)

    digest = hashlib.sha256(rows.inputs.numpy().tobytes() + rows.labels.numpy().tobytes()).hexdigest()
    return Source(name, title, role, len(rows), checksum("sentences", digest), read, show=None, level=level)


def by_length(rows: LabelledData) -> LabelledData:
    """Return rows of tokens, padded with 0, in order of their lengths, so that batches need little padding."""
    order = (rows.inputs != 0).sum(1).argsort(stable=True)
    return LabelledData(rows.inputs[order], rows.labels[order])
