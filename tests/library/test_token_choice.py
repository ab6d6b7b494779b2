"""Classes that are tokens: the posterior of a language model that chooses among a few tokens is that of a module written by hand."""

import re
import threading

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, HeadError, OptionError
from molaplace.network.head import hooked
from molaplace.network.token_choice import TokenChoice
from tests.closeness import assert_close

transformers = pytest.importorskip("transformers", reason="NO TRANSFORMERS: `make setup` installs it")
peft = pytest.importorskip("peft", reason="NO PEFT: `make setup` installs it")
tokenizers = pytest.importorskip("tokenizers", reason="NO TOKENIZERS: `make setup` installs it")

VOCABULARY = 30
TOKENS = [7, 2, 19]
TEXTS = torch.randint(1, VOCABULARY, (24, 6), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3
ALL = torch.ones_like(TEXTS)
LEFT = ALL.clone()
LEFT[::2, :3] = 0
RIGHT = ALL.clone()
RIGHT[1::3, 4:] = 0
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def build(kind="Llama", seed=0, **settings):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, initializer_range=0.3, **settings
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def gpt2():
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=9, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).eval()


def adapted(model, **settings):
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    return peft.get_peft_model(model, config).eval()


def with_prompt():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(build(), config).eval()


MODELS = {
    "Llama": build,
    "tied": lambda: build(tie_word_embeddings=True),
    "GPT-2": gpt2,
    "Phi, with a bias": lambda: build("Phi"),
    "LoRA": lambda: adapted(build(), target_modules=["q_proj"]),
    "LoRA on the head": lambda: adapted(build(), target_modules=["q_proj", "lm_head"]),
    "LoRA on tied weights": lambda: adapted(
        build(tie_word_embeddings=True), target_modules=["embed_tokens", "lm_head"]
    ),
    "a saved head": lambda: adapted(build(), target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "prompt tuning": with_prompt,
    "bfloat16": lambda: build().bfloat16(),
}


def loader(mask):
    parts = [slice(start, start + 8) for start in range(0, 24, 8)]
    batches = [{"input_ids": TEXTS[part], "labels": LABELS[part]} for part in parts]
    return (
        batches
        if mask is None
        else [{**batch, "attention_mask": mask[part]} for batch, part in zip(batches, parts, strict=True)]
    )


def logits_of_tokens(model, mask):
    """The logits of the tokens after each text alone, without padding, selected from those of the whole vocabulary."""
    texts = [text[row.bool()][None] for text, row in zip(TEXTS, mask, strict=True)]
    with torch.no_grad():
        return torch.cat([model(input_ids=text).logits[:, -1, TOKENS] for text in texts])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_the_models_own(name):
    model = MODELS[name]()
    for mask in (ALL, LEFT, RIGHT):
        posterior = mola.fit(model, loader(mask), tokens=TOKENS, progress=False)
        expected = logits_of_tokens(model, mask).float()
        (network,) = posterior.networks
        with torch.no_grad():
            logits = network(TEXTS, mask)
        scale = float(expected.abs().max())
        assert_close(logits, expected, scale=1000 * scale if name == "bfloat16" else scale)  # three digits only
        assert posterior.components[0].head.outputs == 3


MASKED = ("Llama", "Mistral", "Qwen2", "Phi", "GPTNeoX", "StableLm", "Falcon", "Bloom", "Mpt", "Mamba")
LEARNED = ("GPT2LMHeadModel", "CTRLLMHeadModel", "OpenAIGPTLMHeadModel", "GPTBigCodeForCausalLM", "BioGptForCausalLM")
FAMILIES = {
    # Positions are relative, or counted in the mask.
    **{f"{kind}ForCausalLM": {} for kind in MASKED},
    "GemmaForCausalLM": {"head_dim": 4},
    "MixtralForCausalLM": {"num_local_experts": 2},
    "GPTJForCausalLM": {"rotary_dim": 2},
    "OPTForCausalLM": {"word_embed_proj_dim": 8, "ffn_dim": 8},
    # Positions are learned and counted in the batch, unless `position_ids` are passed.
    **{name: {} for name in LEARNED},
    **{name: {"is_decoder": True} for name in ("BertLMHeadModel", "ElectraForCausalLM", "RemBertForCausalLM")},
    "GPTNeoForCausalLM": {"attention_types": [[["global"], 1]], "num_layers": 1},
    "XGLMForCausalLM": {"d_model": 8, "attention_heads": 2, "num_layers": 1, "ffn_dim": 8},
    # Positions are counted in the batch, and there are no `position_ids`.
    **{
        f"{kind}ForCausalLM": {"d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
        for kind in ("Bart", "Marian", "Pegasus", "TrOCR")
    },
    "RoFormerForCausalLM": {"is_decoder": True},
    # The state is recurrent, and the mask is not read.
    "RwkvForCausalLM": {"attention_hidden_size": 8, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_does_not_change_an_answer(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    settings = {
        **SIZES,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    model = kind(kind.config_class(**{**settings, **FAMILIES[name]})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5)
        network = TokenChoice(model, TOKENS)
        lengths = [6, 5, 3, 1]
        alone = torch.cat([network(TEXTS[[row], :length]) for row, length in enumerate(lengths)])
        for left in (True, False):
            texts = torch.zeros_like(TEXTS[:4])
            mask = torch.zeros_like(texts)
            for row, length in enumerate(lengths):
                part = slice(6 - length, 6) if left else slice(length)
                texts[row, part] = TEXTS[row, :length]
                mask[row, part] = 1
            assert_close(
                network(texts, mask), alone, scale=10 * float(alone.abs().max()), name="left" if left else "right"
            )


class AnswerHead(nn.Module):
    """The small module that `tokens` replaces."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        layer = model.lm_head
        self.head = nn.Linear(layer.in_features, 3, bias=layer.bias is not None)
        self.head.weight.data = layer.weight.data[TOKENS]
        if layer.bias is not None:
            self.head.bias.data = layer.bias.data[TOKENS]

    def forward(self, input_ids, attention_mask):
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True
        ).hidden_states[-1]
        return self.head(
            torch.stack([states[row.bool()][-1] for states, row in zip(hidden, attention_mask, strict=True)])
        )


@pytest.mark.filterwarnings("ignore:the temperature is")
@pytest.mark.parametrize(("kinds", "mask"), [(("Llama", "Phi, with a bias"), LEFT), (("GPT-2",), RIGHT)])
def test_the_posterior_is_that_of_a_module_written_by_hand(kinds, mask):
    models = [MODELS[kind]() for kind in kinds]
    batches = loader(mask)
    posterior = mola.fit(models, batches[:2], batches[2:], tokens=TOKENS, progress=False)
    by_hand = mola.fit([AnswerHead(model).eval() for model in models], batches[:2], batches[2:], progress=False)
    for component, expected in zip(posterior.components, by_hand.components, strict=True):
        for sums_name, values in expected.layer.sums.tensors.items():
            assert_close(component.layer.sums.tensors[sums_name], values)
    batch = {"input_ids": TEXTS, "attention_mask": mask}
    assert_close(posterior(batch), by_hand(batch))


def test_the_vocabulary_is_not_computed_in_a_fit():
    model = build()
    values = []
    posterior = mola.ensemble(model, tokens=TOKENS)
    with hooked([model.lm_head], lambda layer, features, outputs: values.append(outputs.numel())):
        posterior.predict(loader(LEFT))
    assert values == [0, 0, 0]


def test_a_call_does_not_take_the_features_of_another_thread():
    """The second call runs in its own thread in the middle of the first."""
    choice = TokenChoice(build(), TOKENS)
    expected = [choice(TEXTS), choice(TEXTS[:5])]
    logits = []

    def call_in_thread(*_):
        handle.remove()
        thread = threading.Thread(target=lambda: logits.append(choice(TEXTS[:5])))
        thread.start()
        thread.join()

    handle = choice.model.model.register_forward_pre_hook(call_in_thread)
    logits.append(choice(TEXTS))
    assert_close(logits[1], expected[0])
    assert_close(logits[0], expected[1])


def test_posteriors_are_saved_loaded_and_shared_with_their_tokens(tmp_path):
    models = [build(), gpt2()]
    posterior = mola.fit(models, loader(RIGHT), tokens=TOKENS, progress=False)
    batch = loader(RIGHT)[0]
    posterior.save(tmp_path / "posterior")
    loaded = mola.load(tmp_path / "posterior", models, tokens=TOKENS)
    assert torch.equal(loaded(batch), posterior(batch))
    for tokens in ([7, 2, 18], None):
        message = rf"networks\[0\].*fitted with the tokens \[7, 2, 19\], got {re.escape(str(tokens))}. Pass tokens=\[7"
        with pytest.raises(mola.errors.StorageError, match=message):
            mola.load(tmp_path / "posterior", models, tokens=tokens)
    mola.hub.save(posterior, tmp_path / "model")
    shared = mola.load(tmp_path / "model")  # nothing but the folder
    assert torch.equal(shared(batch), posterior(batch))


@pytest.mark.export
def test_a_choice_among_tokens_can_be_traced_with_both_sides_of_padding():
    (network,) = mola.ensemble(build(), tokens=TOKENS).networks
    batch = {"input_ids": TEXTS[:4], "attention_mask": ALL[:4]}
    sizes = {name: {0: torch.export.Dim("batch")} for name in batch}
    with torch.no_grad():
        traced = torch.export.export(network, (), batch, dynamic_shapes=sizes, strict=False).module()
        for mask in (LEFT, RIGHT):
            assert_close(traced(input_ids=TEXTS, attention_mask=mask), network(TEXTS, mask))


# --- strings ----------------------------------------------------------------------------------------------------------


def tokenizer():
    words = ["<pad>", "<unk>", " A", " B", "yes", "no", "n", "t"]
    model = tokenizers.models.WordPiece(
        {word: index for index, word in enumerate(words)}, unk_token="<unk>", continuing_subword_prefix=""
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>", pad_token="<pad>"
    )


def test_strings_are_tokens_of_the_tokenizer():
    posterior = mola.fit(build(), loader(ALL), tokens=[" B", " A", "yes"], tokenizer=tokenizer(), progress=False)
    by_id = mola.fit(build(), loader(ALL), tokens=[3, 2, 4], progress=False)
    assert torch.equal(posterior({"input_ids": TEXTS}), by_id({"input_ids": TEXTS}))
    by_name = {"tokens": [" B", " A", "yes"], "tokenizer": tokenizer()}
    scaled = mola.calibration.temperature_scaled(build(), loader(ALL), **by_name, progress=False)
    by_hand = mola.calibration.temperature_scaled(
        build(), loader(ALL), logits=lambda output: output.logits[:, -1, [3, 2, 4]], progress=False
    )
    assert_close(scaled({"input_ids": TEXTS}), by_hand({"input_ids": TEXTS}))
    assert scaled.temperature != 1
    network = build()
    for tokens, message in (
        (["yes", "nt"], "'nt' is 2 tokens"),
        (["B", "yes"], "' B' is a single token|'B' is its unknown token"),
        (["yes", "maybe"], "'maybe' is its unknown token"),
        (["yes", "yes"], "must be different"),
    ):
        with pytest.raises(OptionError, match=message) as raised:
            mola.ensemble(network, tokens=tokens, tokenizer=tokenizer())
        assert raised.value.argument == "tokens"


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": [" A", " B"]}, "Pass tokenizer="),
        ({"tokens": "AB"}, "two or more ids"),
        ({"tokens": [3]}, "two or more ids"),
        ({"tokens": [3, " A"]}, "two or more ids"),
        ({"tokens": [3, 3]}, "must be different"),
        ({"tokens": [3, VOCABULARY]}, "ids from 0 to 29"),
        ({"tokens": [3, -1]}, "ids from 0 to 29"),
        ({"tokens": TOKENS, "logits": lambda output: output.logits}, "logits="),
        ({"tokens": TOKENS, "head": "lm_head"}, "head="),
        ({"tokenizer": "any"}, "no tokens"),
    ],
)
def test_wrong_tokens_are_named(settings, message):
    with pytest.raises(OptionError, match=message):
        mola.fit(build(), loader(ALL), **settings, progress=False)


@pytest.mark.parametrize("run", [mola.fit, lambda model, batches: mola.evaluate(mola.ensemble(model), batches)])
def test_labels_of_whole_texts_ask_for_tokens(run, monkeypatch):
    """Even if a fit of the whole vocabulary does not fit into memory."""
    monkeypatch.setattr("molaplace.structures.base.free_memory", lambda: 0)
    with pytest.raises(DataError, match=r"batch 0 of .*shape \(8,\).*logits for 30 tokens.*tokens=\["):
        run(build(), loader(ALL))


class PackedLinear(nn.Module):
    """A quantised layer, whose weights are integers."""

    def __init__(self, layer):
        super().__init__()
        self.register_buffer("packed", (layer.weight.data * 100).to(torch.int8))

    def forward(self, x):
        return x @ (self.packed.float().T / 100)


def quantised():
    model = build()
    model.lm_head = PackedLinear(model.lm_head)
    return model


def classifier():
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES))


def encoder_decoder():
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build("Gemma2", head_dim=4, num_key_value_heads=2), "soft-cap"),
        (lambda: build("Granite", logits_scaling=3.0), "logit_scale"),
        (quantised, "quantised"),
        (classifier, "not a causal language model"),
        (encoder_decoder, "not a causal language model"),
        (lambda: nn.Linear(2, 3), "not a causal language model"),
    ],
)
def test_models_whose_logits_are_not_rows_times_features_are_refused(model, message):
    with pytest.raises(HeadError, match=rf"networks\[1\].*{message}"):
        mola.ensemble([gpt2(), model()], tokens=TOKENS)


def changed(values, index, value):
    copy = values.clone()
    copy[index] = value
    return copy


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"attention_mask": changed(ALL, 5, 0)}, "text 5 marks no token"),
        ({"attention_mask": changed(ALL, (7, 2), 0)}, "text 7 marks no token, or has gaps"),
        ({"attention_mask": ALL[:, :4]}, r"shape \(24, 6\)"),
        ({"input_ids": changed(TEXTS, (3, slice(4, 6)), 0)}, "padding token 0"),
        ({"input_ids": changed(TEXTS, (3, slice(2)), 0)}, "padding token 0"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"labels": torch.tensor(TOKENS)[LABELS]}, "ids of tokens"),
        ({"labels": changed(torch.full_like(TEXTS, -100), (slice(None), -1), 7)}, "one for each position"),
        ({"input_ids": changed(TEXTS, (slice(None), -1), torch.tensor(TOKENS)[LABELS])}, "its own answer"),
    ],
)
def test_texts_and_labels_that_hide_the_answer_are_refused(batch, message):
    inputs = transformers.BatchEncoding({"input_ids": TEXTS, "labels": LABELS, **batch})
    with pytest.raises(DataError, match=message):
        mola.fit(build(), [inputs], tokens=TOKENS, progress=False)
