r"""Language models that choose among a few tokens, such as the answers " A" to " D" of a question.

The features :math:`\phi` of a text are the input of the model's output embeddings at the last position that is not padding. The logits
of the C tokens are :math:`W \phi`, where :math:`W` consists of the rows of the output embeddings that belong to the tokens. These rows
are the last layer of a `TokenChoice`: a choice among tokens is a classification into C classes. The logits of the other tokens are not
computed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from molaplace.errors import DataError, HeadError, OptionError
from molaplace.network.calling import Batch, call, evaluating, takes, transformers_models
from molaplace.network.head import hooked, linear_errors
from molaplace.numerics import to_float64

CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of transformers' causal language models; encoders with a decoder, which may have such names, are none."""


def causal_language_model(network: nn.Module) -> Any:
    """Return the outermost model of transformers in a network if it is a causal language model, and None otherwise."""
    model: Any = next(iter(transformers_models(network)), None)
    if model is None or getattr(model.config, "is_encoder_decoder", False):
        return None
    return model if any(kind.__name__.endswith(CAUSAL) for kind in type(model).__mro__) else None


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_ids(tokens: Any, tokenizer: Any = None) -> list[int]:
    """Return the ids of tokens, given as ids or as strings; raise `OptionError` unless each is one token and all are different."""
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    kinds = {type(token) for token in values} if isinstance(values, (list, tuple)) else set()
    if kinds not in ({int}, {str}) or len(values) < 2 or (kinds == {str} and tokenizer is None):
        raise OptionError(
            f"must be two or more ids of tokens, such as [330, 365], or strings. Pass tokenizer=tokenizer with strings, which turns them "
            f"into ids. Got {tokens!r}.",
            argument="tokens",
        )
    ids = [_token_id(text, tokenizer) for text in values] if kinds == {str} else list(values)
    if len(set(ids)) < len(ids):
        raise OptionError(
            f"must be different, because each is a class; got {tokens!r}, with the ids {ids}.", argument="tokens"
        )
    return ids


def _token_id(text: str, tokenizer: Any) -> int:
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        other = text.lstrip() if text.startswith(" ") else f" {text}"
        alternative = list(tokenizer(other, add_special_tokens=False)["input_ids"])
        hint = f" With this tokenizer, {other!r} is a single token." if len(alternative) == 1 else ""
        raise OptionError(
            f"must be single tokens, but {text!r} is {len(ids)} tokens, {tokenizer.convert_ids_to_tokens(ids)}.{hint} Choose answers of "
            f"one token, such as letters, and name them in the text.",
            argument="tokens",
        )
    if ids[0] == getattr(tokenizer, "unk_token_id", None):
        raise OptionError(f"must be known to the tokenizer, but {text!r} is its unknown token.", argument="tokens")
    return int(ids[0])


# --- the network ------------------------------------------------------------------------------------------------------


class TokenChoice(nn.Module):
    """A causal language model whose outputs are the logits of a few tokens after each text, shape (n, C).

    The model may be a model of transformers, with adapters or without, or a module around it that returns its logits.

    Args:
        model: the language model.
        tokens: ids of the tokens, in the order of the classes.

    Raises:
        HeadError: if the model is not a causal language model, or its logits are not the outputs of its output embeddings.
        OptionError: if an id is not in the vocabulary.
    """

    def __init__(self, model: nn.Module, tokens: Sequence[int]) -> None:
        super().__init__()
        self.model: nn.Module = model
        self.head: nn.Linear = _layer_of(model, tokens)
        self.tokens: Tensor
        self.register_buffer("tokens", torch.tensor(tokens, device=self.head.weight.device))

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the logits of the tokens after each text; padding may be left or right. Without a mask, there is none."""
        texts = inputs.get("inputs_embeds") if input_ids is None else input_ids
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs = {name: value for name, value in inputs.items() if value is not None}
        last = None
        if attention_mask is None:
            self._check_unpadded(input_ids)
        else:
            shape = attention_mask.shape if texts is None else texts.shape
            last = last_positions(attention_mask, (shape[0], shape[1]))
            first = (attention_mask != 0).long().argmax(1)
            inputs = _without_left_padding(inputs, first)
            last = last - first
        features = self._features(inputs)
        count, positions = features.shape[:2]
        length = positions if texts is None else texts.shape[1]
        if positions < length:
            raise DataError(
                f"the language model computes logits for {positions} of {length} positions. Remove arguments such as logits_to_keep from "
                f"the batch."
            )
        # Prompt tuning puts its own positions before the text.
        answers = positions - 1 if last is None else last.to(features.device) + (positions - length)
        logits: Tensor = self.head(features[torch.arange(count, device=features.device), answers])
        return logits

    def _features(self, inputs: dict[str, Any]) -> Tensor:
        # Return the input (n, T, P) of the output embeddings, which then run at no position.
        language_model = causal_language_model(self.model)
        without_cache = {**inputs, "use_cache": False}
        if "use_cache" in inspect.signature(language_model.forward).parameters and takes(self.model, (), without_cache):
            inputs = without_cache
        thread = threading.get_ident()
        features: list[Tensor] = []

        def capture(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if threading.get_ident() != thread:
                return None
            features.append(arguments[0])
            return (arguments[0][:, :0], *arguments[1:])

        handle = language_model.get_output_embeddings().register_forward_pre_hook(capture)
        try:
            self.model(**inputs)
        finally:
            handle.remove()
        return features[-1]

    def _check_unpadded(self, input_ids: Tensor | None) -> None:
        # Raise DataError if texts without a mask begin or end with padding, which the model would read as part of the text.
        padding = getattr(causal_language_model(self.model).config, "pad_token_id", None)
        if input_ids is None or padding is None or torch.compiler.is_compiling():
            return
        if bool((input_ids[:, [0, -1]] == padding).any()):
            raise DataError(
                f"texts begin or end with the padding token {padding}, but there is no attention mask, so that the padding would be read "
                f'as text. Pass the mask of the tokenizer: {{"input_ids": ..., "attention_mask": ...}}.'
            )


def _layer_of(model: nn.Module, tokens: Sequence[int]) -> nn.Linear:
    # Return a linear layer with the rows of the tokens, after a pass over three tokens that compares it with the model's own logits.
    kind = type(model).__name__
    language_model = causal_language_model(model)
    embeddings = None if language_model is None else language_model.get_output_embeddings()
    if embeddings is None:
        raise HeadError(
            f"{kind} is not a causal language model of transformers with output embeddings (lm_head), which `tokens` needs. Load the "
            f"model with AutoModelForCausalLM. Encoders, with or without a decoder, do not predict the token after a text."
        )
    floating = [parameter.is_floating_point() for parameter in embeddings.parameters()]
    if not floating or not all(floating):
        raise HeadError(
            f"the output embeddings (lm_head) of {kind} are quantised: a {type(embeddings).__name__} without weights in floating point. "
            f"Leave them in floating point when you quantise the model, for example by llm_int8_skip_modules=['lm_head']."
        )
    thread = threading.get_ident()
    passes: list[tuple[Tensor, Tensor, nn.Linear]] = []

    def record(layer: nn.Module, features: Tensor, outputs: Tensor) -> None:
        # The rows are read during the pass, while the model's adapter is active.
        if threading.get_ident() == thread:
            passes.append((features, outputs, _rows(layer, features, outputs.shape[-1], tokens)))

    with evaluating(model), hooked([embeddings], record):
        logits = call(model, {"input_ids": torch.arange(3, device="cpu")[None]})
    if not passes or not _are_rows(*passes[-1], logits, tokens):
        raise HeadError(
            f"the logits of {kind} are not the outputs W x + b of its output embeddings (lm_head). If the network selects some of them, "
            f"pass the language model itself. If the model scales them (`logit_scale`, `logits_scaling`) or limits them by a soft-cap "
            f"(`final_logit_softcapping`), they are not rows of lm_head times features, and `tokens` does not support the model."
        )
    return passes[-1][2]


def _are_rows(features: Tensor, outputs: Tensor, rows: nn.Linear, logits: Tensor, tokens: Sequence[int]) -> bool:
    # Whether the logits are the embeddings' outputs, and those of the tokens are linear in the features.
    errors, tolerance = linear_errors(rows, features, outputs[..., tokens])
    return torch.equal(to_float64(logits), to_float64(outputs)) and float(errors.max()) <= tolerance


def _rows(layer: nn.Module, features: Tensor, vocabulary: int, tokens: Sequence[int]) -> nn.Linear:
    # Differentiate W x + b with respect to x, which gives the rows of any layer, including those with adapters.
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise OptionError(
            f"must be ids from 0 to {vocabulary - 1:,}, the size of the model's vocabulary; got {list(tokens)}.",
            argument="tokens",
        )
    shape = (len(tokens), features.shape[-1])
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(shape, dtype=features.dtype, device=features.device, requires_grad=True)
        outputs = layer.forward(x)[range(len(tokens)), tokens]
        (weight,) = torch.autograd.grad(outputs.sum(), x)
        bias = outputs.detach()
        has_bias = getattr(layer, "bias", None) is not None or bool(bias.any())
        rows = nn.Linear(shape[1], shape[0], bias=has_bias, dtype=features.dtype, device="meta")
        rows.weight = nn.Parameter(weight, requires_grad=False)
        if has_bias:
            rows.bias = nn.Parameter(bias, requires_grad=False)
    return rows


def _without_left_padding(inputs: Mapping[str, Any], first: Tensor) -> dict[str, Any]:
    # Move each text, given its first position, to position 0. Models with learned positions or a recurrent state count from there, and
    # many of them accept no `position_ids`.
    shape = inputs["attention_mask"].shape
    rows = torch.arange(shape[0], device=first.device)[:, None]
    positions = (torch.arange(shape[1], device=first.device) + first[:, None]) % shape[1]

    def moved(values: Any) -> Any:
        by_position = isinstance(values, Tensor) and values.dim() in (2, 3) and values.shape[:2] == shape
        return values[rows, positions] if by_position else values

    return {name: moved(values) for name, values in inputs.items()}


# --- texts and labels -------------------------------------------------------------------------------------------------


def last_positions(mask: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the last position of each text that is not padding, given the attention mask (n, T); padding may be left or right.

    Raises:
        DataError: if a text is empty, or its positions are not contiguous.
    """
    is_token = mask != 0
    if tuple(is_token.shape) != shape:
        raise DataError(
            f"expected an attention mask of shape {shape}, one entry for each token; got {tuple(is_token.shape)}."
        )
    positions = torch.arange(shape[1], device=mask.device)
    last = (is_token * positions).argmax(1)
    if not torch.compiler.is_compiling():
        first = is_token.long().argmax(1)
        wrong = (last - first + 1 != is_token.sum(1)).nonzero().flatten()
        if len(wrong):
            raise DataError(
                f"the attention mask of text {int(wrong[0])} marks no token, or has gaps. Remove empty texts, and pad at the left or the "
                f"right of a text, as the tokenizer does."
            )
    return last


def texts_of(batch: Batch) -> Tensor | None:
    """Return the ids of tokens in a batch: "input_ids" of a mapping, the first argument of a tuple, or the inputs themselves."""
    inputs = batch.inputs
    if isinstance(inputs, Mapping):
        inputs = inputs.get("input_ids")
    elif isinstance(inputs, (tuple, list)):
        inputs = inputs[0]
    return inputs if isinstance(inputs, Tensor) else None


def check_choices(networks: Iterable[nn.Module], batch: Batch, outputs: Sequence[int], batch_name: str) -> None:
    """Raise `DataError` if the labels of a choice among tokens are token ids, labels of every position, or the last tokens of the texts."""
    labels = batch.labels
    texts = texts_of(batch)
    if labels is None or len(outputs) != 2 or texts is None or texts.dim() != 2:
        return
    tokens = next(
        (module.tokens for network in networks for module in network.modules() if isinstance(module, TokenChoice)), None
    )
    if tokens is None:
        return
    tokens = tokens.to(labels.device)
    indices = f"Labels are indices from 0 to {len(tokens) - 1} into `tokens`, one for each text."
    if labels.shape == texts.shape and labels.shape[1] != len(tokens):
        raise DataError(
            f"the labels have shape {tuple(labels.shape)}, one for each position. {indices}", place=batch_name
        )
    if labels.dim() != 1 or labels.is_floating_point() or not len(labels):
        return
    if int(labels.max()) >= len(tokens) and bool(torch.isin(labels, tokens).all()):
        raise DataError(f"the labels are ids of tokens, such as {int(labels.max())}. {indices}", place=batch_name)
    if int(labels.min()) < 0 or int(labels.max()) >= len(tokens):
        return
    mask = batch.inputs.get("attention_mask") if isinstance(batch.inputs, Mapping) else None
    texts = texts.to(labels.device)
    mask = torch.ones_like(texts) if mask is None else mask.to(labels.device)
    last = texts.gather(1, last_positions(mask, (texts.shape[0], texts.shape[1]))[:, None]).squeeze(1)
    if int(labels.min()) < int(labels.max()) and bool((last == tokens[labels]).all()):
        raise DataError(
            "each text ends with its own answer, and the logits predict the token after it. End each text before the answer.",
            place=batch_name,
        )
