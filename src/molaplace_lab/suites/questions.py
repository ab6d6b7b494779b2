"""The suite of questions with four choices, answered by a language model with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from molaplace.demo import LabelledData
from molaplace.images import even_indices
from molaplace_lab.adapters import LANGUAGE_MODEL, ShuffledByLength, adapted_language_model, description
from molaplace_lab.data.questions import LETTERS, Question, load_questions
from molaplace_lab.measures import standard_errors
from molaplace_lab.suite import DataOptions, Source, Suite, TrainingData
from molaplace_lab.suites.text_sources import by_length, text_source
from molaplace_lab.training import Recipe

BATCH = 64
HELD_OUT = 500
"""Number of training questions that are kept for validation, evenly spaced."""
TRAIN = 3000
"""Number of the other questions to train on, evenly spaced."""
SHIFTED = 1000
"""Number of questions of ARC-Easy, evenly spaced."""


@cache
def _tokens(questions: tuple[Question, ...]) -> LabelledData:
    ids = LANGUAGE_MODEL.token_ids([question.prompt() for question in questions])
    return by_length(LabelledData(ids, torch.tensor([question.answer for question in questions])))


def _chosen(questions: Sequence[Question], count: int | None) -> tuple[Question, ...]:
    indices = even_indices(len(questions), min(len(questions), count or len(questions)))
    return tuple(questions[index] for index in indices.tolist())


def _training_questions(options: DataOptions) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    # Return the questions to train on and those held out for validation.
    published = load_questions("openbookqa-train", options.directory)
    held_out = set(even_indices(len(published), min(HELD_OUT, len(published) // 2)).tolist())
    train = [question for index, question in enumerate(published) if index not in held_out]
    return _chosen(train, options.train or TRAIN), tuple(published[index] for index in sorted(held_out))


def _sources(options: DataOptions) -> dict[str, Source]:
    train, validation = _training_questions(options)
    test = _chosen(load_questions("openbookqa-test", options.directory), options.test)
    shifted = _chosen(load_questions("arc-easy-test", options.directory), options.shifted or SHIFTED)
    source = partial(text_source, batch_size=BATCH)
    return {
        "train": source("train", "OpenBookQA train", "train", _tokens(train)),
        "validation": source("validation", "OpenBookQA train, held out", "validation", _tokens(validation)),
        "test": source("test", "OpenBookQA test", "test", _tokens(test)),
        "arc": source("arc", "ARC-Easy", "shift", _tokens(shifted), level=1.0),
    }


def _training(options: DataOptions, recipe: Recipe) -> TrainingData:
    train, validation = _training_questions(options)
    describe = description(LANGUAGE_MODEL, _tokens(validation), BATCH)
    return TrainingData(_tokens(train), lambda rows: rows, ShuffledByLength, describe)


QUESTIONS_LORA = Suite(
    name="questions-lora",
    title="Questions, adapters",
    builders={"smollm2-lora": lambda: adapted_language_model([f" {letter}" for letter in LETTERS])},
    classes=tuple(LETTERS),
    recipe=Recipe(epochs=1, batch_size=8, learning_rate=2e-3),
    threshold=None,
    shift={"title": "ARC-Easy", "axis": "0: OpenBookQA, 1: ARC-Easy"},
    make_sources=_sources,
    training_data=_training,
    measures=lambda options: {"standard errors": partial(standard_errors, ("test", "arc"))},
    options=frozenset({"train", "test", "shifted"}),
    components=3,
    sweep=3,
    notes=(
        "The networks share SmolLM2-135M's weights, which are frozen; each has its own LoRA adapter, trained for one epoch on OpenBookQA. "
        "An answer is the logits of the four letters after the prompt.",
        "ARC-Easy has questions of school science from other exams: none is used for training or tuning.",
    ),
    cost_of_training=False,
)
"""OpenBookQA with LoRA adapters of the language model SmolLM2-135M, and ARC-Easy as the shifted data."""
