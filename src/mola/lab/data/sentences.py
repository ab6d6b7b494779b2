"""Sentences as rows of numbers: the mean of their tokens' rows in the table that the package `wordllama` brings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mola.errors import DataError, MissingExtraError

WIDTH = 256
"""Numbers in a row."""

TABLE, TOKENS = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"


def embed(sentences: Sequence[str]) -> Tensor:
    """A row for each sentence.

    The package's files are read directly: nothing of it is imported, and nothing is downloaded.

    Args:
        sentences: at least one word each.

    Returns:
        (n, WIDTH) in float32.
    """
    table, tokenizer = _package()
    rows = torch.empty(len(sentences), WIDTH)
    for index, encoded in enumerate(tokenizer.encode_batch(list(sentences), add_special_tokens=False)):
        if not encoded.ids:
            raise DataError(f"sentence {index} is empty ({sentences[index]!r}): leave it out.")
        rows[index] = table[encoded.ids].mean(0)
    return rows


@cache
def _package() -> tuple[Tensor, Any]:
    try:
        from tokenizers import Tokenizer

        folder = Path(str(distribution("wordllama").locate_file("wordllama")))
    except (ImportError, PackageNotFoundError) as error:
        raise MissingExtraError(feature="features of sentences", package="wordllama", extra="text") from error
    try:
        table = load_file(folder / TABLE)["embedding.weight"].float()
        tokenizer = Tokenizer.from_file(str(folder / TOKENS))
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(
            f"wordllama's files in {folder} cannot be read ({error}): install it again, version 0.4."
        ) from error
    return table, tokenizer
