"""Views of one model: K adapters on one backbone, and K heads on one trunk, are K separate networks that share their weights."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, HeadError, MolaWarning, OptionError, StorageError
from molaplace.network import views as views_module
from tests import saved_files
from tests.closeness import assert_close

transformers = pytest.importorskip("transformers", reason="NO TRANSFORMERS: `make setup` installs it")
peft = pytest.importorskip("peft", reason="NO PEFT: `make setup` installs it")

NAMES = ["first", "second", "third"]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
OPTIONS = {"vocab_size": 20, "num_labels": 3, "pad_token_id": 0, **SIZES}
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(1, 20, (30, 6), generator=GENERATOR)
MASK = (torch.arange(6) < torch.randint(2, 7, (30, 1), generator=GENERATOR)).long()
LABELS = torch.arange(30) % 3
X = torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.arange(24) % 3
FIELDS = ("probs", "epistemic", "ood_score", "distance", "logit_variance")


def batch(start, end):
    """A batch as a collator of transformers makes it."""
    tensors = {"input_ids": TOKENS * MASK, "attention_mask": MASK, "labels": LABELS}
    return transformers.BatchEncoding({name: tensor[start:end] for name, tensor in tensors.items()})


TRAIN = [batch(0, 10), batch(10, 20)]
VAL = [batch(20, 30)]


def randomised(model):
    """The model in evaluation mode, with the weights of its adapters and heads drawn at random."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "prompt", "classifier", "score")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model.eval()


def with_adapters(base, config):
    model = peft.get_peft_model(base, config, adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.add_adapter(name, config)
    return randomised(model)


def lora(*modules, **options):
    return peft.LoraConfig(r=2, target_modules=list(modules), **options)


def bert(config=None):
    torch.manual_seed(0)
    base = transformers.BertForSequenceClassification(transformers.BertConfig(**OPTIONS))
    return with_adapters(base, lora("query", "value", task_type="SEQ_CLS") if config is None else config)


def llama():
    torch.manual_seed(0)
    base = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**OPTIONS))
    return with_adapters(base, lora("q_proj", "v_proj", task_type="SEQ_CLS"))


def without_peft_model():
    """A model of transformers, to which adapters were added without `get_peft_model`."""
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**OPTIONS))
    for name in NAMES:
        model.add_adapter(lora("query", modules_to_save=["classifier"]), name)
    return randomised(model)


class Classifier(nn.Module):
    """A user's module around an encoder with adapters, with one head for all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = with_adapters(transformers.BertModel(transformers.BertConfig(**OPTIONS)), lora("query", "value"))
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.classifier(states[:, 0])


MODELS = {
    "BERT, a head for each adapter": bert,
    "BERT, one head for all adapters": lambda: bert(lora("query", "value")),
    "BERT, in bfloat16": lambda: bert().to(torch.bfloat16),
    "BERT, weight-decomposed adapters of all layers": lambda: bert(lora("query", "dense", use_dora=True)),
    "Llama": llama,
    "a model of transformers": without_peft_model,
    "a module around an encoder": Classifier,
}


def separate_models(model):
    """Full copies of a model, each with one of the adapters."""
    copies = []
    for name in NAMES:
        separate = copy.deepcopy(model)
        holder = getattr(separate, "encoder", separate)
        holder.set_adapter(name)
        for other in set(NAMES) - {name}:
            holder.delete_adapter(other)
        copies.append(separate)
    return copies


def fitted(networks, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", MolaWarning)
        return mola.fit(networks, TRAIN, progress=False, **options).with_temperature(0.8).with_pooling(0.5)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.parametrize("case", MODELS)
def test_views_are_separate_models_that_share_their_tensors(case):
    model = MODELS[case]()
    holder = getattr(model, "encoder", model)
    holder.set_adapter("second")
    flags = [parameter.requires_grad for parameter in model.parameters()]
    logits = model(**{name: values for name, values in TRAIN[0].items() if name != "labels"})
    views = mola.adapters(model)
    posterior = fitted(views)
    expected = fitted(separate_models(model)).predict(VAL)
    prediction = posterior.predict(VAL)
    for name in FIELDS:
        assert_close(getattr(prediction, name), getattr(expected, name), "search", name=name)
    members = [mola.ensemble(view).predict(VAL).probs for view in views]
    assert not any(torch.allclose(members[0], probs, atol=1e-3) for probs in members[1:])

    memory = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.data_ptr() for view in views for tensor in view.state_dict().values()} <= memory
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    again = model(**{name: values for name, values in TRAIN[0].items() if name != "labels"})
    outputs, before = (getattr(values, "logits", values) for values in (again, logits))
    assert torch.equal(outputs, before)


def test_views_pick_and_order_adapters_by_name():
    model = bert()
    first, second, third = mola.adapters(model)
    picked = mola.adapters(model, ["third", "first"])
    inputs = VAL[0]
    assert torch.equal(mola.ensemble(picked[0])(inputs), mola.ensemble(third)(inputs))
    assert torch.equal(mola.ensemble(picked[1])(inputs), mola.ensemble(first)(inputs))
    (view,) = mola.adapters(model, "second")
    assert torch.equal(mola.ensemble(view)(inputs), mola.ensemble(second)(inputs))
    with pytest.warns(MolaWarning, match="same network was passed more than once"):
        mola.ensemble([view, second])


def test_calls_from_threads_do_not_meet():
    """Eight threads call mixtures and views while another switches the model's adapter; every result is the serial one."""
    model = bert()
    posterior = mola.fit(mola.adapters(model), TRAIN, progress=False)
    pairs = mola.fit(mola.adapters(model, NAMES[1:]), TRAIN, progress=False)
    calls = [(predictor, batch(start, start + 5)) for predictor in (posterior, pairs) for start in range(0, 30, 5)] * 2
    with torch.no_grad():
        expected = [predictor(inputs) for predictor, inputs in calls]
    stop = threading.Event()

    def switch():
        while not stop.is_set():
            for name in NAMES:
                model.set_adapter(name)

    def call(index):
        predictor, inputs = calls[index]
        with torch.no_grad():
            return predictor(inputs)

    switching = threading.Thread(target=switch)
    switching.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(call, range(len(calls))))
    finally:
        stop.set()
        switching.join()
    for result, probs in zip(results, expected, strict=True):
        assert_close(result, probs, "search")


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
def test_adapters_of_experts_answer_in_threads_as_in_one():
    """`peft` replaces the weights of the experts during a call."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(vocab_size=20, num_local_experts=4, num_key_value_heads=2, **SIZES)
    base = transformers.MixtralForCausalLM(config).float()
    experts = lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], init_lora_weights=False)
    posterior = mola.ensemble(mola.adapters(with_adapters(base, experts)), tokens=[7, 2, 19])
    calls = [{"input_ids": TOKENS[start : start + 2]} for start in range(0, 30, 2)] * 4
    expected = [posterior(inputs) for inputs in calls]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(posterior, calls))
    for result, probs in zip([*results, *map(posterior, calls)], [*expected, *expected], strict=True):
        assert_close(result, probs, "search")


def test_new_data_after_further_training_of_an_adapter_are_refused():
    model = bert()
    posterior = mola.fit(mola.adapters(model), TRAIN[:1], progress=False)
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if f"lora_A.{NAMES[1]}" in name).mul_(1.01)
    with pytest.raises(OptionError, match=r"networks\[1\].*have changed"):
        posterior.add(TRAIN[1:], progress=False)
    with pytest.raises(OptionError, match="weights"):
        posterior + mola.fit(mola.adapters(model), TRAIN[1:], progress=False)


def test_what_goes_with_a_posterior_goes_with_views(tmp_path):
    model = bert()
    views = mola.adapters(model)
    posterior = mola.fit(views, TRAIN, VAL, progress=False)
    separate = mola.fit(separate_models(model), TRAIN, VAL, progress=False)
    assert_close(posterior.joint(VAL[0]).covariance(), separate.joint(VAL[0]).covariance(), "search")
    assert_close(posterior.function(3)(VAL[0]), separate.function(3)(VAL[0]), "search")
    half = mola.fit(mola.adapters(model), TRAIN[:1], progress=False)
    assert_close(
        half.add(TRAIN[1:], progress=False).predict(VAL).probs, mola.fit(views, TRAIN).predict(VAL).probs, "search"
    )
    assert_close(
        (posterior + half).without(TRAIN[:1], progress=False).predict(VAL).probs, posterior.predict(VAL).probs, "search"
    )
    watched, expected = (mola.watch(mixture, VAL).update(mixture.predict(TRAIN)) for mixture in (posterior, separate))
    assert watched.count == 20
    assert_close(watched.accuracy.value, expected.accuracy.value, "search")


def test_adapters_of_a_language_model_choose_among_tokens(tmp_path):
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**OPTIONS))
    model = with_adapters(base, lora("q_proj", "lm_head", task_type="CAUSAL_LM"))
    views = mola.adapters(model)
    posterior = mola.fit(views, TRAIN, tokens=[3, 5, 7], progress=False)
    separate = mola.fit(separate_models(model), TRAIN, tokens=[3, 5, 7], progress=False)
    assert_close(posterior.predict(VAL).probs, separate.predict(VAL).probs, "search")
    posterior.save(tmp_path)
    loaded = mola.load(tmp_path, views, tokens=[3, 5, 7])
    assert_close(loaded.predict(VAL).probs, separate.predict(VAL).probs, "search")
    checksums = views_module.state_checksums(posterior.networks)
    assert len({backbone for backbone, _ in checksums}) == 1
    with pytest.raises(
        StorageError, match=r"of the tokens or the adapter differ.*those of the language model are the same"
    ):
        mola.load(tmp_path, views[::-1], tokens=[3, 5, 7])


# --- files --------------------------------------------------------------------------------------------------------------


def test_a_posterior_belongs_to_its_adapters_and_its_backbone(tmp_path, monkeypatch):
    model = bert()
    views = mola.adapters(model)
    posterior = mola.fit(views, TRAIN, progress=False)
    hashed = []
    compute = views_module.checksum_of
    monkeypatch.setattr(views_module, "checksum_of", lambda state: hashed.append(state) or compute(state))
    posterior.save(tmp_path)
    assert sum(tensor.numel() for state in hashed for tensor in state.values()) == sum(
        tensor.numel() for name, tensor in model.state_dict().items() if "original_module" not in name
    ), "the backbone is hashed once"
    document = saved_files.read(tmp_path / "posterior.safetensors")[0]
    assert len({part["network"] for part in document["components"]}) == 1
    assert len({part["adapter"] for part in document["components"]}) == 3

    expected = posterior.predict(VAL).probs
    twin = copy.deepcopy(model)
    alone = [mola.adapters(copy.deepcopy(model), name)[0] for name in NAMES]
    for networks in (views, mola.adapters(twin), alone):
        assert_close(mola.load(tmp_path, networks).predict(VAL).probs, expected, "search")
    with pytest.raises(
        StorageError, match=r"networks\[0\]: .*weights of the adapter differ.*networks\[1\] has the saved"
    ):
        mola.load(tmp_path, [views[1], views[0], views[2]])
    with torch.no_grad():
        next(values for name, values in twin.named_parameters() if "lora_A.second" in name).add_(1)
    with pytest.raises(
        StorageError, match=r"networks\[1\]: the weights of the adapter differ.*those of the backbone are the same"
    ):
        mola.load(tmp_path, mola.adapters(twin))
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(values for name, values in other.named_parameters() if "embeddings" in name).add_(1)
    with pytest.raises(
        StorageError, match=r"networks\[0\]: the weights of the backbone differ.*those of the adapter are the same"
    ):
        mola.load(tmp_path, mola.adapters(other))


def test_a_hub_folder_holds_the_adapters_without_their_backbone(tmp_path):
    model = bert()
    posterior = mola.fit(mola.adapters(model), TRAIN, progress=False)
    folder = mola.hub.save(posterior, tmp_path / "model")
    assert not list(folder.rglob("model.safetensors"))
    backbone = transformers.BertForSequenceClassification(transformers.BertConfig(**OPTIONS))
    backbone.load_state_dict(model.unload().state_dict())
    paths = [folder / "networks" / str(index) / name for index, name in enumerate(NAMES)]
    loaded = peft.PeftModel.from_pretrained(backbone, paths[0], adapter_name=NAMES[0])
    for name, path in zip(NAMES[1:], paths[1:], strict=True):
        loaded.load_adapter(path, adapter_name=name)
    expected = posterior.predict(VAL).probs
    assert_close(mola.load(folder, mola.adapters(loaded.eval())).predict(VAL).probs, expected, "search")
    with pytest.raises(OptionError, match=r"first holds an adapter without its backbone.*mola\.adapters"):
        mola.hub.load(folder)


def test_an_adapter_may_be_deleted_or_merged_after_the_fit(tmp_path):
    model = bert()
    posterior = mola.fit(mola.adapters(model), TRAIN, progress=False)
    expected = posterior.predict(VAL).probs
    model.delete_adapter("third")
    assert torch.equal(posterior.predict(VAL).probs, expected)
    model.merge_adapter(["first"])
    with pytest.raises(DataError, match=r"'first' has been merged into the backbone.*unmerge_adapter"):
        posterior(VAL[0])
    model.unmerge_adapter()
    assert_close(posterior.predict(VAL).probs, expected)
    with torch.no_grad():
        model.base_model.model.classifier.modules_to_save["second"].weight.add_(1)
    with pytest.raises(
        StorageError, match=r"networks\[0\]: the weights of the backbone have changed since the posterior was fitted"
    ):
        posterior.save(tmp_path)


@pytest.mark.export
@pytest.mark.parametrize("name", ["posterior.pt2", "posterior.onnx"])
def test_an_exported_file_holds_one_backbone(name, tmp_path):
    torch.manual_seed(0)
    width = 512
    base = nn.Sequential(
        nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    ).float()
    model = with_adapters(base, lora("2", modules_to_save=["4"]))
    ensemble = mola.ensemble(mola.adapters(model, NAMES[:2]))
    write = mola.export.onnx if name.endswith("onnx") else mola.export.torch_export
    # The file's outputs are compared with the ensemble's.
    written = write(ensemble, tmp_path / name, X[:4].float(), outputs=["probs"])
    assert written.bytes < 1.5 * 4 * width**2


def test_an_adapter_is_not_merged_in_one_of_several_networks():
    views = mola.adapters(bert())
    posterior = mola.ensemble(views)
    expected = posterior.predict(VAL).probs
    for merge in (views[0].merge_and_unload, views[1].merge_adapter):
        with pytest.raises(DataError, match="share a backbone"):
            merge()
    assert torch.equal(posterior.predict(VAL).probs, expected)


# --- several heads on one trunk -----------------------------------------------------------------------------------------


class Counted(nn.Sequential):
    """A trunk that counts its calls and the inputs in them."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def trunk_and_heads():
    torch.manual_seed(0)
    trunk = Counted(nn.Linear(5, 6), nn.Tanh())
    heads = nn.ModuleList(
        [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(6, 3)]
    )
    return trunk.double().eval(), heads.double().eval()


def test_several_heads_run_their_trunk_once(tmp_path):
    trunk, heads = trunk_and_heads()
    networks = mola.adapters(trunk, heads=heads)
    loader = [(X[:8], Y[:8]), (X[8:16], Y[8:16])]
    posterior = mola.fit(networks, loader, progress=False)
    assert trunk.calls == len(loader), "the heads are found in the pass over the first batch"
    trunk.calls = 0
    prediction = posterior.predict([X[16:20], X[20:]])
    assert trunk.calls == 2
    assert posterior(X[16:]).shape == (8, 3)
    assert mola.ensemble(networks)(X[16:]).shape == (8, 3)
    assert trunk.calls == 4

    separate = [nn.Sequential(copy.deepcopy(trunk), copy.deepcopy(head)) for head in heads]
    expected = mola.fit(separate, loader, progress=False).predict(X[16:])
    for name in FIELDS:
        assert_close(getattr(prediction, name), getattr(expected, name), "search", name=name)

    posterior.save(tmp_path)
    assert_close(mola.load(tmp_path, mola.adapters(trunk, heads=heads)).predict(X[16:]).probs, expected.probs, "search")
    with torch.no_grad():
        heads[1][0].bias.add_(1)
    with pytest.raises(
        StorageError, match=r"networks\[1\]: the weights of the head differ.*those of the trunk are the same"
    ):
        mola.load(tmp_path, networks)


class WithMirrorImage(nn.Module):
    """The mean of a network's logits for inputs and for their mirror images."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return (self.network(x) + self.network(x.flip(1))) / 2


def test_a_trunk_runs_again_for_other_inputs():
    trunk, heads = trunk_and_heads()
    branches = mola.adapters(trunk, heads=heads)
    separate = [nn.Sequential(trunk, head) for head in heads]
    expected = mola.ensemble([WithMirrorImage(network) for network in separate])(X)
    assert_close(mola.ensemble([WithMirrorImage(branch) for branch in branches])(X), expected)


def test_a_trunk_may_have_no_weights(tmp_path):
    heads = [nn.Linear(5, 3).double() for _ in range(2)]
    posterior = mola.fit(mola.adapters(nn.Flatten(), heads=heads), [(X, Y)], progress=False)
    posterior.save(tmp_path)
    assert_close(
        mola.load(tmp_path, mola.adapters(nn.Flatten(), heads=heads)).predict(X).probs, posterior.predict(X).probs
    )


def test_heads_on_a_trunk_of_transformers():
    """A trunk may return anything that the heads take, and batches are mappings."""

    class Pooled(nn.Sequential):
        def forward(self, output):
            return super().forward(output.last_hidden_state[:, 0])

    torch.manual_seed(0)
    trunk = transformers.BertModel(transformers.BertConfig(**OPTIONS)).eval()
    heads = [Pooled(nn.Linear(8, 3)) for _ in range(2)]
    runs = []
    trunk.register_forward_hook(lambda *_: runs.append(1))
    posterior = mola.fit(mola.adapters(trunk, heads=heads), TRAIN, VAL, progress=False)
    assert len(runs) == len(TRAIN) + len(VAL)
    features = trunk(TOKENS * MASK, MASK).last_hidden_state[:, 0]
    logits = torch.stack([head[0](features) for head in heads])
    assert_close(mola.ensemble(list(posterior.networks))(batch(0, 30)), logits.softmax(-1).mean(0))


# --- quantised backbones ------------------------------------------------------------------------------------------------


class State:
    """Scales and packed weights outside parameters and buffers, as bitsandbytes keeps them."""

    def __init__(self, weight):
        self.scales = [weight.abs().max() / 127]
        self.packed = (weight / self.scales[0]).round().to(torch.int8)


class Packed(nn.Module):
    """A stand-in for a quantised linear layer."""

    def __init__(self, layer):
        super().__init__()
        self.state = State(layer.weight.detach())
        self.bias = nn.Parameter(layer.bias.detach())

    def forward(self, x):
        return nn.functional.linear(x, self.state.packed.to(x.dtype) * self.state.scales[0], self.bias)


class Int8Linear(nn.Linear):
    """A stand-in for a quantised layer that is a subclass of nn.Linear."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features)
        self.state = State(layer.weight.detach())
        self.weight = nn.Parameter(self.state.packed, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.state.scales[0], self.bias)


def test_a_quantised_backbone_is_shared_and_needs_a_head_in_floating_point():
    model = bert()
    layer = model.base_model.model.bert.encoder.layer[0]
    layer.output.dense = Packed(layer.output.dense)
    views = mola.adapters(model)
    states = [view.base_model.model.bert.encoder.layer[0].output.dense.state for view in views]
    for state in states:
        assert state.packed is layer.output.dense.state.packed
        assert state.scales[0] is layer.output.dense.state.scales[0]
    expected = mola.fit(separate_models(model), TRAIN, progress=False).predict(VAL).probs
    assert_close(mola.fit(views, TRAIN, progress=False).predict(VAL).probs, expected, "search")

    model = bert(lora("query"))
    model.base_model.model.classifier = Int8Linear(model.base_model.model.classifier)
    with pytest.raises(
        HeadError, match=r"'base_model\.model\.classifier', which has quantised weights.*in floating point"
    ):
        mola.fit(mola.adapters(model), TRAIN, progress=False)


# --- wrong use ----------------------------------------------------------------------------------------------------------


def merged():
    model = bert()
    model.merge_adapter(["second"])
    return mola.adapters(model)


def unloaded():
    model = bert()
    model.merge_and_unload()
    return mola.adapters(model)


def disabled():
    model = bert()
    model.base_model.disable_adapter_layers()
    return mola.adapters(model)


def head_in_place():
    trunk, _ = trunk_and_heads()
    heads = [nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(6, 3)).double() for _ in range(2)]
    return mola.ensemble(mola.adapters(trunk, heads=heads))(X)


def attention():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 3)})
    return mola.adapters(with_adapters(model, lora("attention")))


WRONG = {
    "adapters that are merged in each call": (attention, OptionError, "MultiheadAttention"),
    "an unknown name": (lambda: mola.adapters(bert(), ["first", "secnd"]), OptionError, "got 'secnd'.*'second'"),
    "a name twice": (lambda: mola.adapters(bert(), ["first", "first"]), OptionError, "at most once"),
    "no names": (lambda: mola.adapters(bert(), []), OptionError, "at least one"),
    "a number": (lambda: mola.adapters(bert(), 3), OptionError, "names must be names.* got 3"),
    "no heads": (lambda: mola.adapters(nn.Linear(3, 3), heads=[]), OptionError, "non-empty"),
    "no adapters": (lambda: mola.adapters(nn.Linear(3, 2)), OptionError, "Linear has none.*heads="),
    "unloaded adapters": (unloaded, OptionError, "has none.*load the backbone"),
    "merged adapters": (merged, OptionError, "'second'.*unmerge_adapter"),
    "disabled adapters": (disabled, OptionError, "enable_adapter_layers"),
    "prompts": (
        lambda: mola.adapters(bert(peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))),
        OptionError,
        "PROMPT_TUNING.*a separate model for each",
    ),
    "several models": (lambda: mola.adapters([bert(), bert()]), OptionError, "got list.*pass the models to mola.fit"),
    "two models in one": (lambda: mola.adapters(nn.ModuleList([bert(), bert()])), OptionError, "has several"),
    "names and heads": (
        lambda: mola.adapters(bert(), ["first"], heads=[nn.Linear(8, 3)]),
        OptionError,
        "pass one of its views",
    ),
    "a head twice": (lambda: mola.adapters(nn.Linear(3, 3), heads=[HEAD, HEAD]), OptionError, "different modules"),
    "a head in place": (head_in_place, HeadError, "Sequential changes the output of the trunk in place"),
    "a head with an adapter": (
        lambda: mola.fit(mola.adapters(bert(lora("query", "classifier"))), TRAIN, progress=False),
        HeadError,
        "'base_model.model.classifier', has an adapter.*modules_to_save",
    ),
}
HEAD = nn.Linear(3, 2)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_named(case):
    use, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        use()


def test_adapters_of_different_backbones_are_noticed():
    model = bert()
    for name, path in zip(NAMES, ("models/bert-base", "/data/bert-base", None), strict=True):
        model.peft_config[name] = lora("query")
        model.peft_config[name].base_model_name_or_path = path
    with warnings.catch_warnings():
        warnings.simplefilter("error", MolaWarning)
        mola.adapters(model)
    model.peft_config["third"].base_model_name_or_path = "roberta-base"
    with pytest.warns(
        MolaWarning, match="different backbones: 'first' on 'models/bert-base'.*'third' on 'roberta-base'"
    ):
        mola.adapters(model)
