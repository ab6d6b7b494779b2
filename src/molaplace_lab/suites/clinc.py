"""The CLINC150 suite: text requests with 150 intents, and out-of-scope requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, partial

import torch

from molaplace.errors import OptionError
from molaplace.evaluation import Role
from molaplace.images import even_indices
from molaplace_lab.checksums import checksum
from molaplace_lab.data.clinc150 import WIDTH, Requests, embed, load_clinc150
from molaplace_lab.measures import rejection
from molaplace_lab.suite import (
    Batches,
    Budget,
    DataOptions,
    MimoBudget,
    Source,
    Suite,
    SwagBudget,
    TrainingData,
)
from molaplace_lab.training import Labelled, Recipe, mlp

BATCH = 256
INTENTS = 150
OUTSIDE, OUTSIDE_VALIDATION = "out of scope", "out of scope, validation"


@cache
def _rows(requests: Requests) -> Labelled:
    return Labelled(embed(requests.sentences), torch.tensor(requests.labels))


def _read(options: DataOptions) -> dict[str, Labelled]:
    if options.normalisation is not None:
        raise OptionError(
            f"the normalisation {options.normalisation!r} is for images, but clinc contains sentences. Omit it."
        )
    limits = {"train": options.train, "test": options.test, "oos_val": options.outliers, "oos_test": options.outliers}
    parts = {}
    for part, requests in load_clinc150(options.directory).items():
        rows = _rows(requests)
        places = even_indices(len(rows), min(len(rows), limits.get(part) or len(rows)))
        parts[part] = Labelled(rows.inputs[places], rows.labels[places])
    return parts


def _source(name: str, title: str, role: Role, rows: Labelled) -> Source:
    def read(places: Sequence[int]) -> Batches:
        return Labelled(rows.inputs[list(places)], rows.labels[list(places)]).batches(BATCH)

    digest = hashlib.sha256(rows.inputs.numpy().tobytes() + rows.labels.numpy().tobytes()).hexdigest()
    return Source(name, title, role, len(rows), checksum("sentences", digest), read, show=None)


def _sources(options: DataOptions) -> dict[str, Source]:
    parts = _read(options)
    outside = parts["oos_val"]
    # Out-of-scope requests have no class, so only their rejections are counted.
    unknown = Labelled(outside.inputs, torch.zeros_like(outside.labels))
    return {
        "train": _source("train", "CLINC150 train", "train", parts["train"]),
        "validation": _source("validation", "CLINC150 validation", "validation", parts["val"]),
        OUTSIDE_VALIDATION: _source(OUTSIDE_VALIDATION, "CLINC150 out of scope, validation", "validation", unknown),
        "test": _source("test", "CLINC150 test", "test", parts["test"]),
        OUTSIDE: _source(OUTSIDE, "out of scope", "outlier", parts["oos_test"]),
    }


CLINC = Suite(
    name="clinc",
    title="CLINC150",
    builders={"mlp": lambda: mlp(WIDTH, (256,), INTENTS)},
    classes=(),
    recipe=Recipe(epochs=20, batch_size=256),
    threshold=None,
    shift=None,
    make_sources=_sources,
    training_data=lambda options, recipe: TrainingData(_read(options)["train"], lambda rows: rows),
    measures=lambda options: {"rejection": partial(rejection, ("validation", OUTSIDE_VALIDATION), ("test", OUTSIDE))},
    budget=Budget(SwagBudget(learning_rate=1e-2, snapshots=20, batch_size=256), MimoBudget(epochs=20)),
    notes=(
        "Features are means of rows of wordllama's token table, 256 numbers; the networks have one hidden layer of 256.",
        "No method sees a request out of scope before it is tested, except that the rejection table's threshold is chosen on the "
        "100 that were published for validation; the 100 for training are not used.",
    ),
)
"""The CLINC150 data (Larson et al., 2019), with five small networks. Under the paper's rule, the threshold is the networks' accuracy
minus 0.01."""
