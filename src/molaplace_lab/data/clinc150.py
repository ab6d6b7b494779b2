"""Reader for CLINC150 (Larson et al., 2019): requests to an assistant, each with one of 150 intents, and out-of-scope requests.

The features of a sentence are the mean of its tokens' embeddings, which come from the package `wordllama`. The files of this package
are read directly; the package is not imported, and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from molaplace.errors import DataError, importing
from molaplace_lab.data.catalogue import data_directory

FILE = "data_full.json"
FOLDERS = ("clinc150", "oos-eval/data", "")
PAGE = "https://github.com/clinc/oos-eval (data/data_full.json, CC BY 3.0)"

PARTS = ("train", "val", "test", "oos_train", "oos_val", "oos_test")
"""Parts of the file: in-scope requests for training, validation and testing, and out-of-scope requests for the same purposes."""

WIDTH = 256
"""Number of features per sentence."""

TABLE = "weights/l2_supercat_256.safetensors"
TOKENS = "tokenizers/l2_supercat_tokenizer_config.json"


@dataclass(frozen=True)
class Requests:
    """Sentences with the indices of their intents; out-of-scope sentences have index -1."""

    sentences: tuple[str, ...]
    labels: tuple[int, ...]
    intents: tuple[str, ...]
    """Names of the intents, in the order of their indices."""


def load_clinc150(directory: Path | str | None = None) -> dict[str, Requests]:
    """Read the published requests, keyed by part (see `PARTS`). Labels follow the alphabetical order of the intents."""
    root = data_directory(directory)
    path = next((file for folder in FOLDERS if (file := root / folder / FILE).is_file()), None)
    if path is None:
        raise DataError(f"CLINC150 is not in {root}. Provide:\n  {root / FOLDERS[0] / FILE}\n  from {PAGE}")
    try:
        document = json.loads(path.read_bytes())
        pairs = {part: [(sentence, intent) for sentence, intent in document[part]] for part in PARTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not the CLINC150 file ({error}). Download it again from {PAGE}.") from error
    intents = sorted({intent for _, intent in pairs["train"]})
    indices = {intent: index for index, intent in enumerate(intents)}
    requests = {}
    for part, examples in pairs.items():
        outside = part.startswith("oos")
        unknown = sorted({intent for _, intent in examples if intent not in indices})
        if unknown and not outside:
            raise DataError(f"{path}: {part} contains intents that are missing from train: {', '.join(unknown[:3])}.")
        labels = tuple(-1 if outside else indices[intent] for _, intent in examples)
        requests[part] = Requests(tuple(sentence for sentence, _ in examples), labels, tuple(intents))
    return requests


def embed(sentences: Sequence[str]) -> Tensor:
    """Return the features of all sentences as float32 of shape (n, WIDTH); raise `DataError` if a sentence has no words."""
    table, tokenizer = _package()
    rows = torch.empty(len(sentences), WIDTH)
    for index, encoded in enumerate(tokenizer.encode_batch(list(sentences), add_special_tokens=False)):
        if not encoded.ids:
            raise DataError(f"sentence {index} is empty ({sentences[index]!r}). Remove it.")
        rows[index] = table[encoded.ids].mean(0)
    return rows


@cache
def _package() -> tuple[Tensor, Any]:
    with importing("features of sentences", "wordllama", "text"):
        from tokenizers import Tokenizer

        folder = Path(str(distribution("wordllama").locate_file("wordllama")))
    try:
        table = load_file(folder / TABLE)["embedding.weight"].float()
        tokenizer = Tokenizer.from_file(str(folder / TOKENS))
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(
            f"wordllama's files in {folder} cannot be read ({error}). Reinstall wordllama, version 0.4."
        ) from error
    return table, tokenizer
