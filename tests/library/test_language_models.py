"""Causal language models of transformers, which shift their labels by themselves: nothing is fitted to the current token."""

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, HeadError
from molaplace.monitoring.baseline import Baseline

transformers = pytest.importorskip("transformers", reason="NO TRANSFORMERS: `make setup` installs it")

VOCABULARY = 5
TOKENS = torch.randint(VOCABULARY, (12, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(TOKENS)
LABELS = TOKENS.clone()
LABELS[:, :2] = -100  # a prompt
LABELS[::3, -2:] = -100  # padding


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def llama():
    torch.manual_seed(2)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    ).eval()


class Logits(nn.Module):
    """A network around a language model, as for adapters."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def by_convention(start, end):
    """Batches of four texts as a collator of transformers makes them."""
    return [
        {"input_ids": TOKENS[i : i + 4], "attention_mask": MASK[i : i + 4], "labels": LABELS[i : i + 4]}
        for i in range(start, end, 4)
    ]


def shifted_by_hand(start, end):
    """The same batches: inputs as a tensor, and at each position the label of the next token."""
    labels = torch.full_like(LABELS, -100)
    labels[:, :-1] = LABELS[:, 1:]
    return [(TOKENS[i : i + 4], labels[i : i + 4]) for i in range(start, end, 4)]


def check_equal(posterior, reference):
    assert posterior.prior_precision == reference.prior_precision
    assert torch.equal(posterior.weights, reference.weights)
    for component, expected in zip(posterior.components, reference.components, strict=True):
        sums = component.layer.sums
        assert sums.count == expected.layer.sums.count
        assert sums.log_likelihood == expected.layer.sums.log_likelihood
        for name, values in expected.layer.sums.tensors.items():
            assert torch.equal(sums.tensors[name], values), name


@pytest.mark.filterwarnings("ignore:the temperature is")  # the networks are untrained
@pytest.mark.parametrize("build", [gpt2, llama, lambda: Logits(gpt2())])
def test_labels_by_convention_are_shifted_as_the_model_does(build):
    network = build()
    ours = mola.fit(network, by_convention(0, 8), by_convention(8, 12), progress=False)
    reference = mola.fit(network, shifted_by_hand(0, 8), shifted_by_hand(8, 12), progress=False)
    check_equal(ours, reference)
    pairs = ((ours, by_convention), (reference, shifted_by_hand))
    tables = [repr(mola.evaluate({"": posterior}, loader(8, 12))) for posterior, loader in pairs]
    assert tables[0] == tables[1]
    tuned = [posterior.tune(loader(4, 12), progress=False) for posterior, loader in pairs]
    check_equal(*tuned)
    accuracies = [Baseline.read(posterior, loader(0, 12)).accuracy for posterior, loader in pairs]
    assert accuracies[0] == accuracies[1] > 0


def test_stacking_weights_are_fitted_to_the_next_token():
    networks = [gpt2(0), gpt2(1)]
    posterior = mola.fit(networks, by_convention(0, 8), progress=False)
    weights = [posterior.reweight(loader(8, 12), progress=False).weights for loader in (by_convention, shifted_by_hand)]
    assert torch.equal(*weights)
    plain = mola.ensemble(networks)
    tables = [mola.evaluate(plain, loader(0, 12)) for loader in (by_convention, shifted_by_hand)]
    assert repr(tables[0]) == repr(tables[1])


def test_the_log_loss_of_a_plain_network_is_the_loss_of_the_model():
    network = gpt2()
    batch = {"input_ids": TOKENS, "labels": LABELS}
    with torch.no_grad():
        loss = float(network(**batch).loss)
    (metrics,) = mola.evaluate(mola.ensemble(network), [batch]).entries.values()
    assert metrics["nll"].value == pytest.approx(loss, rel=1e-5)


def test_labels_that_contradict_the_convention_are_refused():
    network = gpt2()
    with pytest.raises(DataError, match=r"batch 0 of the training loader.*equal its input tokens.*t \+ 1.*input_ids"):
        mola.fit(network, [(TOKENS, TOKENS)], progress=False)
    (inputs, labels), *_ = shifted_by_hand(0, 12)
    batch = {"input_ids": inputs, "labels": labels}
    with pytest.raises(
        DataError, match=r"batch 0 of the training loader.*already shifted.*Pass labels equal to input_ids"
    ):
        mola.fit(network, [batch], progress=False)
    posterior = mola.fit(network, by_convention(0, 8), progress=False)
    with pytest.raises(DataError, match="already shifted"):
        mola.evaluate(posterior, [batch])


def test_labels_of_other_models_stay_where_they_are():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    for kind in ("BertForMaskedLM", "BertForTokenClassification"):
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=VOCABULARY, **sizes)
        network = getattr(transformers, kind)(config).eval()
        ours = mola.fit(network, [{"input_ids": TOKENS, "labels": LABELS}], progress=False)
        check_equal(ours, mola.fit(network, [(TOKENS, LABELS)], progress=False))


INPUTS = {"input_ids": TOKENS, "attention_mask": MASK}
CLASSES = torch.arange(12) % 3


class IgnoringKeys(transformers.DistilBertForSequenceClassification):
    """Ignores keys that it does not know, as most models of transformers 5 do; in earlier versions, some raise a TypeError."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **others):
        return super().forward(input_ids, attention_mask, labels=labels)


@pytest.mark.parametrize(
    ("others", "key"),
    [
        ({"label": CLASSES}, "label"),
        ({"label_ids": CLASSES}, "label_ids"),
        ({"length": CLASSES, "intent": CLASSES}, "intent"),
        ({"tags": TOKENS}, "tags"),
        ({"labels": CLASSES, "intent": CLASSES}, None),
        ({"token_type_ids": MASK, "special_tokens_mask": MASK, "position_ids": MASK}, None),
        ({"scores": CLASSES.double(), "overflow_to_sample_mapping": CLASSES}, None),
    ],
)
def test_training_labels_that_a_model_would_ignore_are_refused(others, key):
    torch.manual_seed(0)
    sizes = {"dim": 8, "hidden_dim": 8, "n_layers": 1, "n_heads": 2, "num_labels": 3}
    network = IgnoringKeys(transformers.DistilBertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    batches = [{**INPUTS, **others}]
    if key is not None:
        with pytest.raises(DataError, match=f"batch 0 of the training loader.*ignore its key '{key}'.*Rename"):
            mola.fit(network, batches, progress=False)
    posterior = mola.fit(network, batches, progress=False) if key is None else mola.ensemble(network)
    assert len(posterior.predict(batches)) == 12  # predictions need no labels


def test_a_fit_over_whole_networks_refuses_them_as_well():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(image_size=4, patch_size=2, num_labels=3, **sizes)
    network = transformers.ViTForImageClassification(config).eval()
    batches = [{"pixel_values": torch.randn(12, 3, 4, 4), "fine_label": CLASSES}]
    with pytest.raises(DataError, match=r"batch 0 of the training loader.*ignore its key 'fine_label'"):
        mola.whole.fit(network, batches, structure="diag", progress=False)


class Answers(nn.Module):
    """A language model that chooses among a few tokens at the last position."""

    def __init__(self, model, tokens):
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).logits[:, -1, self.tokens]


@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_slice_of_the_vocabulary_is_told_to_become_tokens(build):
    network = Answers(build(), [1, 3, 4])
    batches = [{"input_ids": TOKENS, "labels": torch.arange(12) % 3}]
    with pytest.raises(HeadError, match=r"3 of the 5 outputs of layer 'model.lm_head'.*tokens=\[\.\.\.\]"):
        mola.fit(network, batches, progress=False)
    with pytest.raises(HeadError, match="selects some of them, pass the language model itself"):
        mola.fit(network, batches, tokens=[1, 3, 4], progress=False)
    assert mola.fit(network.model, batches, tokens=[1, 3, 4], progress=False).components[0].head.outputs == 3


@pytest.mark.filterwarnings("ignore:the logits contradict", "ignore:on these data")  # the network is untrained
def test_scores_of_choices_are_told_to_become_binary_inputs():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    network = transformers.BertForMultipleChoice(transformers.BertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    choices = {"input_ids": TOKENS.view(4, 3, 7), "labels": torch.tensor([0, 1, 2, 0])}
    with pytest.raises(HeadError, match=r"'classifier' scores one choice at a time.*3 choices.*likelihood='bernoulli'"):
        mola.fit(network, [choices], progress=False)
    calibrated = mola.calibration.temperature_scaled(network, [choices])
    assert calibrated.predict(choices).probs.shape == (4, 3)
    score = transformers.BertForSequenceClassification(
        network.config.__class__(vocab_size=VOCABULARY, num_labels=1, **sizes)
    )
    right = torch.eye(3)[choices["labels"]].view(12, 1)
    binary = mola.fit(score, [{"input_ids": TOKENS, "labels": right}], likelihood="bernoulli", progress=False)
    assert binary.predict({"input_ids": TOKENS}).probs.shape == (12, 1)


class OwnHead(nn.Module):
    """A network whose last layer is not an nn.Linear, after a linear layer at every position."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 8)
        self.weight = nn.Parameter(torch.randn(8, 3))

    def forward(self, x):
        return self.body(x).mean(1) @ self.weight


def test_a_network_that_computes_its_logits_is_not_taken_for_a_slice():
    torch.manual_seed(0)
    with pytest.raises(HeadError, match=r"'body' returns shape \(6, 4, 8\).*returns shape \(6, 3\)"):
        mola.fit(OwnHead(), [(torch.randn(6, 4, 5), torch.arange(6) % 3)], progress=False)
