"""Labels of causal language models.

The logits at position t of a causal language model belong to the token at t + 1. Models of transformers take `labels=input_ids` and shift
the labels by themselves when they compute the loss. Batches of such models, mappings with the keys "input_ids" and "labels", therefore
hold at position t the label of the logits at t - 1. All other modules expect the label of the logits at t, as for any dense output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from molaplace.errors import DataError
from molaplace.network.calling import Batch
from molaplace.network.token_choice import causal_language_model, check_choices, texts_of


def labels_of_logits(
    networks: Sequence[nn.Module], batch: Batch, outputs: Sequence[int], ignore_index: int, batch_name: str
) -> Tensor | None:
    """Return the label of the logits at each position, given the shape of the logits.

    Labels of a causal language model are shifted by one position if the inputs are a mapping, as the model does, and the last position
    of each text is ignored. All other labels are returned unchanged.

    Raises:
        DataError: if labels in a mapping are already shifted, or labels beside a tensor of tokens are not, or if texts have one label.
    """
    labels = batch.labels
    check_choices(networks, batch, outputs, batch_name)
    if labels is None or len(outputs) != 3:
        return labels
    check_positions_labelled(networks, batch, outputs[2], batch_name)
    if labels.shape != outputs[:2]:
        return labels
    if not any(_is_causal(network, outputs[2]) for network in networks):
        return labels
    tokens = texts_of(batch)
    known = labels != ignore_index
    equal_inputs = False
    equal_next_inputs = False
    if tokens is not None and tokens.shape == labels.shape and bool(known.any()):
        tokens = tokens.to(labels.device)
        equal_inputs = bool((labels == tokens)[known].all())
        equal_next_inputs = bool((labels[:, :-1] == tokens[:, 1:])[known[:, :-1]].all())
    if not isinstance(batch.inputs, Mapping):
        if equal_inputs and not equal_next_inputs:
            raise DataError(
                "the labels of a causal language model equal its input tokens, but the logits at position t belong to the token at t + 1. "
                'Pass {"input_ids": tokens, "labels": tokens}, which is shifted as transformers does, or (tokens[:, :-1], tokens[:, 1:]).',
                place=batch_name,
            )
        return labels
    if equal_next_inputs and not equal_inputs and bool(known[:, :-1].any()):
        raise DataError(
            "the labels are already shifted: each equals the next input token. Causal language models of transformers shift the labels "
            f"by themselves, and so does the fit. Pass labels equal to input_ids, with {ignore_index} at positions to ignore.",
            place=batch_name,
        )
    last = torch.full_like(labels[:, :1], ignore_index)
    return torch.cat([labels[:, 1:], last], dim=1)


def check_positions_labelled(networks: Sequence[nn.Module], batch: Batch, vocabulary: int, batch_name: str) -> None:
    """Raise `DataError` if each text has a single label, but a causal language model has logits for its vocabulary at every position."""
    labels = batch.labels
    if labels is not None and labels.dim() == 1 and any(_is_causal(network, vocabulary) for network in networks):
        raise DataError(
            f"the labels have shape {tuple(labels.shape)}, one for each text, but a causal language model has logits for {vocabulary:,} "
            f"tokens at every position. If the labels are answers of one token, name these tokens, such as tokens=[' A', ' B'] with "
            f"tokenizer=tokenizer. For next tokens, pass labels equal to input_ids.",
            place=batch_name,
        )


def _is_causal(network: nn.Module, width: int) -> bool:
    # Whether the network is a causal language model whose vocabulary has this size.
    model = causal_language_model(network)
    vocabulary = None if model is None else model.get_output_embeddings()
    return vocabulary is not None and len(vocabulary.weight) == width
