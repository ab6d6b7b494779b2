"""The CLINC150 suites: text requests with 150 intents, and out-of-scope requests.

One trains small networks on fixed features of the requests, the other trains adapters of a sentence encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from molaplace.demo import LabelledData
from molaplace.images import even_indices
from molaplace.perceptrons import mlp
from molaplace_lab.adapters import ENCODER, ShuffledByLength, adapted_encoder, description
from molaplace_lab.data.clinc150 import WIDTH, Requests, embed, load_clinc150
from molaplace_lab.measures import Measure, rejection
from molaplace_lab.suite import Budget, DataOptions, MimoBudget, Source, Suite, SwagBudget, TrainingData
from molaplace_lab.suites.text_sources import by_length, text_source
from molaplace_lab.training import Recipe

BATCH = 256
INTENTS = 150
HALF = 7500
"""Number of training requests for adapters, 50 of each intent."""
MAX_TOKENS = 32
"""Longer requests are cut off."""
OUTSIDE = "out of scope"
OUTSIDE_VALIDATION = "out of scope, validation"


@cache
def _features(requests: Requests) -> LabelledData:
    return LabelledData(embed(requests.sentences), torch.tensor(requests.labels))


@cache
def _tokens(requests: Requests) -> LabelledData:
    return LabelledData(ENCODER.token_ids(requests.sentences, MAX_TOKENS), torch.tensor(requests.labels))


Rows = Callable[[Requests], LabelledData]
"""Function that turns requests into the networks' inputs, one row for each."""


def _read(options: DataOptions, rows_of: Rows) -> dict[str, LabelledData]:
    limits = {"train": options.train, "test": options.test, "oos_val": options.outliers, "oos_test": options.outliers}
    parts = {}
    for part, requests in load_clinc150(options.directory).items():
        rows = rows_of(requests)
        indices = even_indices(len(rows), min(len(rows), limits.get(part) or len(rows)))
        parts[part] = LabelledData(rows.inputs[indices], rows.labels[indices])
    return parts


def _sources(parts: dict[str, LabelledData]) -> dict[str, Source]:
    outside = parts["oos_val"]
    # Out-of-scope requests have no class, so only their rejections are counted.
    unknown = LabelledData(outside.inputs, torch.zeros_like(outside.labels))
    return {
        "train": text_source("train", "CLINC150 train", "train", parts["train"]),
        "validation": text_source("validation", "CLINC150 validation", "validation", parts["val"]),
        OUTSIDE_VALIDATION: text_source(OUTSIDE_VALIDATION, "CLINC150 out of scope, validation", "validation", unknown),
        "test": text_source("test", "CLINC150 test", "test", parts["test"]),
        OUTSIDE: text_source(OUTSIDE, "out of scope", "outlier", parts["oos_test"]),
    }


def _rejection(options: DataOptions) -> dict[str, Measure]:
    return {"rejection": partial(rejection, ("validation", OUTSIDE_VALIDATION), ("test", OUTSIDE))}


OUTSIDE_NOTE = (
    "No method sees a request out of scope before it is tested, except that the rejection table's threshold is chosen on the "
    "100 that were published for validation; the 100 for training are not used."
)

CLINC = Suite(
    name="clinc",
    title="CLINC150",
    builders={"mlp": lambda: mlp(WIDTH, (256,), INTENTS)},
    classes=(),
    recipe=Recipe(epochs=20, batch_size=256),
    threshold=None,
    shift=None,
    make_sources=lambda options: _sources(_read(options, _features)),
    training_data=lambda options, recipe: TrainingData(_read(options, _features)["train"], lambda rows: rows),
    measures=_rejection,
    options=frozenset({"train", "test", "outliers"}),
    budget=Budget(SwagBudget(learning_rate=1e-2, snapshots=20, batch_size=256), MimoBudget(epochs=20)),
    notes=(
        "Features are means of rows of wordllama's token table, 256 numbers; the networks have one hidden layer of 256.",
        OUTSIDE_NOTE,
    ),
)
"""The CLINC150 data (Larson et al., 2019), with five small networks. Under the paper's rule, the threshold is the networks' accuracy
minus 0.01."""


def _half(options: DataOptions) -> DataOptions:
    return replace(options, train=options.train or HALF)


def _adapter_sources(options: DataOptions) -> dict[str, Source]:
    return _sources({part: by_length(rows) for part, rows in _read(_half(options), _tokens).items()})


def _adapter_training(options: DataOptions, recipe: Recipe) -> TrainingData:
    parts = _read(_half(options), _tokens)
    return TrainingData(parts["train"], lambda rows: rows, ShuffledByLength, description(ENCODER, parts["val"], BATCH))


CLINC_LORA = Suite(
    name="clinc-lora",
    title="CLINC150, adapters",
    builders={"minilm-lora": partial(adapted_encoder, INTENTS)},
    classes=(),
    recipe=Recipe(epochs=3, batch_size=32, learning_rate=2e-3),
    threshold=None,
    shift=None,
    make_sources=_adapter_sources,
    training_data=_adapter_training,
    measures=_rejection,
    options=frozenset({"train", "test", "outliers"}),
    sweep=5,
    notes=(
        "The networks share MiniLM's weights, which are frozen; each has its own LoRA adapter and head, trained on every second request.",
        OUTSIDE_NOTE,
    ),
    cost_of_training=False,
)
"""The CLINC150 data, with LoRA adapters of the sentence encoder MiniLM."""
