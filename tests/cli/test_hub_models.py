"""Classifiers of Hugging Face's transformers as they are: tiny, with random weights, made offline.

The judge is a plain linear layer on features that transformers itself gives out (its pooled or hidden states), so that nothing
of molaplace's watching is in it.
"""

import copy
import os
from dataclasses import dataclass
from functools import cache

import pytest
import torch

import molaplace as mola
from tests.closeness import assert_close

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Random weights on random labels: searches for a prior precision or a temperature run to the end of their range.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")]


CLASSES = 3
VOCABULARY = 40
PAD = 1
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "num_labels": CLASSES,
}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": PAD}
SPECIAL = {"bos_token_id": 2, "eos_token_id": 3}


def last_token(hidden, batch):
    """Hidden states at the last token that is no padding."""
    return hidden[torch.arange(len(hidden)), batch["attention_mask"].sum(1) - 1]


@dataclass(frozen=True)
class FittedFolder:
    """A network of transformers: how it is built, its head's name, and its features by transformers' own means."""

    network: str
    config: str
    settings: dict
    head: str
    features: object
    images: bool = False

    def build(self, seed):
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(seed)
        network = getattr(transformers, self.network)(getattr(transformers, self.config)(**self.settings))
        # Heads begin with weights of 0.02: everything would be one third.
        with torch.no_grad():
            for parameter in network.get_submodule(self.head).parameters():
                parameter.normal_()
        return network


KINDS = {
    "bert": FittedFolder(
        "BertForSequenceClassification", "BertConfig", SMALL | WORDS, "classifier",
        lambda network, batch: network.bert(**batch).pooler_output,
    ),
    "gpt2": FittedFolder(
        "GPT2ForSequenceClassification",
        "GPT2Config",
        SPECIAL | {"vocab_size": VOCABULARY, "n_positions": 32, "pad_token_id": PAD, "num_labels": CLASSES}
        | {"n_embd": 16, "n_layer": 1, "n_head": 2},
        "score",
        lambda network, batch: last_token(network.transformer(**batch).last_hidden_state, batch),
    ),
    "vit": FittedFolder(
        "ViTForImageClassification", "ViTConfig", SMALL | {"image_size": 16, "patch_size": 8}, "classifier",
        lambda network, batch: network.vit(**batch).last_hidden_state[:, 0],
        images=True,
    ),
}  # fmt: skip


@cache
def networks(name):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return tuple(KINDS[name].build(seed) for seed in (1, 2))
    finally:
        torch.set_default_dtype(before)


def data(name, count=30, seed=0):
    """All inputs in one batch; texts of 3 to 9 tokens, padded to the longest."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    if KINDS[name].images:
        return {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator), "labels": labels}
    mask = torch.arange(9) < torch.randint(3, 10, (count, 1), generator=generator)
    words = torch.randint(4, VOCABULARY, (count, 9), generator=generator)
    return {"input_ids": torch.where(mask, words, PAD), "attention_mask": mask.long(), "labels": labels}


def batches(whole, size):
    for start in range(0, len(whole["labels"]), size):
        yield {key: value[start : start + size] for key, value in whole.items()}


def without_labels(whole):
    return {key: value for key, value in whole.items() if key != "labels"}


def linear_twin(name, network, whole):
    """The head alone, and the features that transformers gives: inputs of an ordinary posterior."""
    with torch.no_grad():
        features = KINDS[name].features(copy.deepcopy(network).eval(), without_labels(whole))
    return copy.deepcopy(network.get_submodule(KINDS[name].head)), features


@pytest.mark.parametrize("name", KINDS)
def test_the_posterior_is_that_of_the_head_on_the_features_transformers_gives(name):
    train = data(name)
    held_out = data(name, 20, seed=1)
    new = data(name, 8, seed=2)
    rule = mola.rules.Score("nll")
    for network in networks(name):
        network.train()  # dropout must not show
        ours = mola.fit(network, batches(train, 7), prior_precision=0.3)
        assert ours.components[0].head.name == KINDS[name].head
        head, features = linear_twin(name, network, train)
        theirs = mola.fit(head, [(features, train["labels"])], prior_precision=0.3)
        ours = ours.tune(list(batches(held_out, 6)), rule=rule)
        theirs = theirs.tune([(linear_twin(name, network, held_out)[1], held_out["labels"])], rule=rule)
        assert ours.prior_precision == pytest.approx(theirs.prior_precision, rel=1e-4)
        ours = ours.predict(new)
        theirs = theirs.predict(linear_twin(name, network, new)[1])
        for part in ("probs", "ood_score", "logit_mean", "logit_variance"):
            torch.testing.assert_close(getattr(ours, part), getattr(theirs, part), rtol=1e-6, atol=1e-9)
        assert network.training


def test_batches_of_a_tokenizer_and_its_collator():
    """The way from texts: a tokenizer, a padding collator, a DataLoader; its batches are no dictionaries."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    plain = Tokenizer(WordLevel({"[UNK]": 0, "[PAD]": PAD, **{f"w{i}": i for i in range(4, VOCABULARY)}}, "[UNK]"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]")
    texts = [" ".join(f"w{4 + (i * j) % 30}" for j in range(1, 3 + i % 6)) for i in range(24)]
    rows = [{**tokenizer(text, return_token_type_ids=False), "label": i % CLASSES} for i, text in enumerate(texts)]
    collate = transformers.DataCollatorWithPadding(tokenizer)
    loader = torch.utils.data.DataLoader(rows, batch_size=5, collate_fn=collate)
    assert not isinstance(next(iter(loader)), dict)
    whole = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    labels = torch.tensor([row["label"] for row in rows])
    for name in ("bert", "gpt2"):
        got = mola.fit(networks(name), loader, loader)
        expected = mola.fit(networks(name), [{**whole, "labels": labels}], [{**whole, "labels": labels}])
        torch.testing.assert_close(got.predict(loader).probs, expected.predict(whole).probs, rtol=1e-6, atol=1e-9)
        assert (got.components[0].layer.sums.count, len(got.predict(whole))) == (24, 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_classified_without_their_padding(dtype):
    """A padding collator gives -100 as the label of padding; each text alone gives the same posterior."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    network = transformers.BertForTokenClassification(transformers.BertConfig(**SMALL, **WORDS)).to(dtype)
    texts = [torch.arange(4, 7 + i % 5) for i in range(12)]
    rows = [{"input_ids": text.tolist(), "labels": (text % CLASSES).tolist()} for text in texts]
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, pad_token=f"w{PAD}")
    collate = transformers.DataCollatorForTokenClassification(tokenizer)
    padded = mola.fit(network, torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate), progress=False)
    alone = mola.fit(network, [(text[None], (text % CLASSES)[None]) for text in texts], progress=False)
    for name, values in alone.components[0].layer.sums.tensors.items():
        scale = float(values.abs().max()) * (1 if dtype == torch.float32 else 1000)
        assert_close(padded.components[0].layer.sums.tensors[name], values, scale=scale, name=name)
    assert padded.components[0].layer.sums.count == sum(map(len, texts))
