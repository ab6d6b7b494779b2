"""Exported files give what `posterior.predict` gives: every structure, link and likelihood, any batch, with PyTorch and without."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import molaplace as mola
from molaplace.errors import DataError, ExportError, MissingExtraError, OptionError, StorageError
from molaplace.export import OUTPUTS, REGRESSION_OUTPUTS, Pixels
from molaplace.export.graph import MORE_OUTPUTS, MORE_REGRESSION_OUTPUTS, check_outputs
from molaplace.export.reading import document_of
from molaplace.export.writing import trace
from tests.conftest import STRUCTURES
from tests.witness import unchanged

onnx = pytest.importorskip("onnx", reason="NO ONNX: install the extra `export`")
pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")]

CLASSES = 5
SIDE = 8
LINKS = ("probit", "probit-centred", "mean-field", "bridge", mola.links.Bridge(normalised=True), "mc")
LINKS += (mola.links.MonteCarlo(30, "weights", seed=4),)


def decided(network: nn.Sequential) -> nn.Module:
    """Logits of several units: near a uniform prediction everything agrees, and tests would see nothing."""
    with torch.no_grad():
        network[-1].weight.mul_(8)
    return network.float().eval()


def small_net(seed: int, outputs: int = CLASSES, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    return decided(nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 7), nn.Tanh(), nn.Linear(7, outputs, bias=bias)))


def conv_net(seed: int) -> nn.Module:
    """Batch normalisation that has seen data, pooling, and a wide head."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)),
    )
    network(torch.randn(50, 1, SIDE, SIDE) * 2 + 1)
    return decided(network)


def data(count: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float32)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def fitted(make=small_net, count: int = 1, **options) -> mola.MoLA:
    return mola.fit([make(seed) for seed in range(count)], [data()], progress=False, **options)


def scaled(posterior: mola.MoLA) -> mola.MoLA:
    """With temperature, pooling and distance exponent; tuning and reference stay."""
    settings = replace(posterior.settings, temperature=0.8, pooling=0.5, distance_exponent=1.5)
    return posterior.with_parts(settings=settings, tuning=posterior.tuning)


def compare(outputs, posterior, inputs, tolerance: float = 1e-5) -> None:
    prediction = posterior.predict(inputs)
    for name, value in outputs.items():
        expected = getattr(prediction, name)
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
        limit = tolerance * (10 if name in ("epistemic", "aleatoric", "ood_score") else 1)
        difference = (value.double() - expected.double()).abs().max()
        assert float(difference) <= limit * max(1, float(expected.double().abs().max())), name


def compare_file(path, posterior, tolerance: float = 1e-5, sizes=(1, 3, 17)) -> None:
    run = mola.export.load(path, trust=True)
    for size in sizes:
        inputs = data(size, seed=size)[0]
        compare(run(inputs), posterior, inputs, tolerance)


# --- the graph is the posterior ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("structure", "link"), list(zip(cycle(STRUCTURES), LINKS, strict=False)), ids=str)
def test_a_trace_gives_the_prediction(structure, link):
    networks = [small_net(seed, bias=seed > 0) for seed in range(2)]
    posterior = scaled(mola.fit(networks, [data()], structure=structure, link=link, prior_precision=[0.1, 1.1]))
    program = trace(posterior, data(2)[0], outputs=["probs", "ood_score", *MORE_OUTPUTS])[0].module()
    for size in (1, 11):
        inputs = 2 * data(size, seed=3)[0]
        with torch.no_grad():
            compare(program(inputs), posterior, inputs)


def test_networks_are_left_as_they_were(tmp_path):
    posterior = fitted(conv_net)
    network = posterior.networks[0].train()
    with unchanged(network):
        mola.export.torch_export(posterior, tmp_path / "file.pt2", data(2)[0], float16=True, outputs=["label"])


# --- ONNX ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "link"),
    [
        ("kron-exact", "probit"),
        ("kron-diag", "probit-centred"),
        ("diag", "mean-field"),
        ("full", "bridge"),
        ("full", mola.links.MonteCarlo(20, "weights")),
    ],
    ids=str,
)
def test_onnxruntime_gives_pytorch_s_outputs(structure, link, tmp_path):
    posterior = scaled(fitted(structure=structure, prior_precision=0.3, link=link))
    outputs = ["probs", "epistemic", "ood_score", "distance"]
    mola.export.onnx(posterior, tmp_path / "file.onnx", data(4)[0], outputs=outputs)
    compare_file(tmp_path / "file.onnx", posterior)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Networks of two architectures and widths, tuned and scaled, with every option."""
    torch.set_default_dtype(torch.float64)
    inputs, labels = data()
    posterior = mola.fit([conv_net(0), small_net(1)], [(inputs, labels)], weights=[0.2, 0.8], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.errors.MolaWarning)  # random labels: the best prior is at an end
        posterior = scaled(posterior.tune([data(40, seed=1)], rule="nll", progress=False))
    path = tmp_path_factory.mktemp("several") / "several.onnx"
    names = ["owl", "cat", "dog", "élan", "fox"]
    thresholds = {"ood_threshold": 0.25, "answer_threshold": 0.3, "set_threshold": 0.2}
    written = mola.export.onnx(posterior, path, inputs[:1], classes=names, **thresholds)
    return SimpleNamespace(posterior=posterior, path=path, written=written, names=names, inputs=inputs)


def test_a_file_describes_itself(several):
    model = onnx.load(several.path)
    onnx.checker.check_model(model, full_check=True)
    assert [tensor.name for tensor in model.graph.input] == ["input"]
    assert [tensor.name for tensor in model.graph.output] == list(OUTPUTS)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert all(not tensor.external_data for tensor in model.graph.initializer)
    loaded = mola.export.load(several.path)
    posterior = several.posterior
    assert (loaded.classes, loaded.outputs) == (several.names, list(OUTPUTS))
    assert loaded.document == several.written.document
    expected = {"prior_precision": list(posterior.prior_precision), "structure": "kron", "rule": posterior.tuning.rule}
    expected |= {"temperature": 0.8, "pooling": 0.5, "distance_exponent": 1.5, "ood_threshold": 0.25}
    assert {name: loaded.document[name] for name in expected} == expected


def test_a_file_runs_at_any_batch_size_and_contains_no_paths(several):
    assert max(several.written.differences.values()) < 1e-4
    compare_file(several.path, several.posterior, sizes=(1, 2, 17, 64))
    content = several.path.read_bytes()
    for word in (str(Path.cwd()), str(Path.home()), "site-packages", ".py"):
        assert word.encode() not in content


def test_an_empty_batch_is_refused_with_the_reason(several):
    with pytest.raises(DataError, match="at least one row, got an empty batch"):
        mola.export.load(several.path)(several.inputs[:0])


@pytest.mark.parametrize("exporter", ["onnx", "torch_export"])
def test_pixels_take_bytes_alone(exporter, tmp_path):
    with pytest.raises(DataError, match=r"example must contain raw pixels as bytes.*torch\.float32"):
        getattr(mola.export, exporter)(fitted(), tmp_path / "file", data(2)[0], preparation=Pixels())
    assert no_files(tmp_path)


def test_decisions_by_the_thresholds_of_the_file(several):
    loaded = mola.export.load(several.path)
    actual = loaded(several.inputs.numpy())
    decided = loaded.decide(actual)
    assert torch.equal(decided["outlying"], actual["ood_score"].double() > 0.25)
    assert torch.equal(decided["answer"], (actual["confidence"].double() > 0.3) & ~decided["outlying"])
    assert torch.equal(decided["set"], actual["probs"].double() >= 0.2)
    with pytest.raises(DataError, match="'ood_score'"):
        loaded.decide({"confidence": actual["confidence"]})
    loaded.document |= {"ood_threshold": None, "answer_threshold": None}
    assert set(loaded.decide({"probs": actual["probs"]})) == {"set"}


def test_the_file_runs_where_there_is_no_torch(several, tmp_path):
    inputs = data(9, seed=5)[0]
    expected = several.posterior.predict(inputs)
    np.savez(tmp_path / "wanted.npz", inputs=inputs.numpy(), **{name: getattr(expected, name) for name in OUTPUTS})
    code = """
        import sys
        for name in ("torch", "molaplace", "onnx", "onnxscript"):
            sys.modules[name] = None  # an import of it fails
        import json, numpy as np, onnxruntime
        session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
        stored = np.load(sys.argv[2])
        names = [output.name for output in session.get_outputs()]
        outputs = dict(zip(names, session.run(names, {"input": stored["inputs"]})))
        classes = json.loads(session.get_modelmeta().custom_metadata_map["molaplace.classes"])
        print(max(float(np.abs(outputs[name] - stored[name]).max()) for name in names), classes[outputs["label"][0]])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(several.path), str(tmp_path / "wanted.npz")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    difference, name = ran.stdout.split()
    assert float(difference) <= 1e-4
    assert name == several.names[int(expected.label[0])]


def test_nan_in_is_unknown_and_outlying(several):
    inputs = several.inputs[:3].clone()
    inputs[1] = torch.nan
    actual = mola.export.load(several.path)(inputs)
    assert (actual["label"] == -1).tolist() == (actual["ood_score"] == torch.inf).tolist() == [False, True, False]
    for name in ("probs", "confidence", "entropy", "epistemic", "distance"):
        assert actual[name].isnan().reshape(3, -1).any(1).tolist() == [False, True, False], name


def test_a_plain_ensemble_is_exported_too(tmp_path):
    """Where members agree on an input, the epistemic part is 0 and not NaN."""
    posterior = mola.ensemble([small_net(0), small_net(1), small_net(1)], weights=[0.5, 0.25, 0.25])
    outputs = ["probs", "epistemic", "ood_score"]
    written = mola.export.torch_export(
        posterior.with_temperature(0.8), tmp_path / "file.pt2", data(2)[0], outputs=outputs
    )
    assert (written.document["structure"], written.document["ood_score"]) == (None, "max-probability")
    compare_file(tmp_path / "file.pt2", posterior.with_temperature(0.8))


def test_half_precision_networks(tmp_path):
    posterior = scaled(fitted(conv_net))
    inputs = data(40, seed=2)[0]
    written = mola.export.onnx(
        posterior, tmp_path / "half.onnx", inputs[:2], float16=True, outputs=["probs", "distance"]
    )
    assert [tensor.dtype for tensor in written.inputs] == ["float32"]
    actual = mola.export.load(tmp_path / "half.onnx")(inputs)
    compare(actual, posterior, inputs, 1e-2)
    assert not torch.equal(actual["probs"], posterior(inputs))
    kinds = {
        tensor.data_type for tensor in onnx.load(tmp_path / "half.onnx").graph.initializer if len(tensor.dims) == 4
    }
    assert kinds == {onnx.TensorProto.FLOAT16}


# --- inputs and likelihoods ----------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """As in transformers: named inputs, one of them integers, and an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, input_ids, attention_mask):
        values = self.embedding(input_ids) * attention_mask[:, :, None]
        return SimpleNamespace(logits=self.head(values.mean(1)))


@pytest.mark.parametrize(("form", "exporter"), [("mapping", "onnx"), ("tuple", "torch_export")])
def test_inputs_by_name_and_by_position(form, exporter, tmp_path):
    tokens = torch.randint(20, (30, 9))
    mask = torch.randint(2, (30, 9)).float()

    def batch(rows):
        if form == "tuple":
            return tokens[rows], mask[rows]
        return {"input_ids": tokens[rows], "attention_mask": mask[rows]}

    loader = [(batch(slice(None)), torch.randint(CLASSES, (30,)))]
    posterior = mola.fit(TwoInputs().float().eval(), loader, progress=False)
    written = getattr(mola.export, exporter)(
        posterior, tmp_path / "file", batch(slice(0, 2)), outputs=["probs", "entropy"]
    )
    assert [(tensor.name, tensor.dtype) for tensor in written.inputs] == [
        ("input_ids", "int64"),
        ("attention_mask", "float32"),
    ]
    loaded = mola.export.load(tmp_path / "file", trust=form == "tuple")
    for rows in (slice(0, 1), slice(3, 14)):
        compare(loaded(batch(rows)), posterior, batch(rows))


@pytest.mark.parametrize("exporter", ["onnx", "torch_export"])
def test_bytes_in_probabilities_out(exporter, tmp_path):
    posterior = fitted()
    pixels = torch.randint(256, (6, 1, SIDE, SIDE), dtype=torch.uint8)
    options = {"outputs": ["probs"], "preparation": Pixels((0.3,), (0.2,))}
    written = getattr(mola.export, exporter)(posterior, tmp_path / "file", pixels, **options)
    assert written.inputs[0].dtype == "uint8"
    actual = mola.export.load(tmp_path / "file", trust=True)(pixels.numpy())
    compare(actual, posterior, (pixels.float() / 255 - 0.3) / 0.2)


@pytest.mark.parametrize(
    ("exporter", "outputs"),
    [pytest.param("onnx", 3, marks=pytest.mark.slow), ("torch_export", 1)],
    ids=["onnx", "torch"],
)
def test_multi_label_and_binary_classification(exporter, outputs, tmp_path):
    networks = [small_net(seed, outputs) for seed in range(2)]
    inputs = data()[0]
    labels = (networks[0](inputs).detach() + torch.randn(60, outputs) > 0).float()
    if outputs == 1:
        networks, labels = [nn.Sequential(network, nn.Flatten(0)) for network in networks], labels.squeeze(1)
    posterior = scaled(mola.fit(networks, [(inputs, labels)], likelihood="bernoulli", progress=False))
    names = [f"label {index}" for index in range(outputs)]
    written = getattr(mola.export, exporter)(posterior, tmp_path / "file", inputs[:4], classes=names)
    assert written.document["likelihood"] == "bernoulli"
    assert [output.shape for output in written.outputs[:3]] == [("batch", outputs)] * 3
    compare_file(tmp_path / "file", posterior)


@pytest.mark.parametrize(
    ("exporter", "heteroscedastic"), [pytest.param("onnx", False, marks=pytest.mark.slow), ("torch_export", True)]
)
def test_regression(exporter, heteroscedastic, tmp_path):
    likelihood = mola.likelihoods.Gaussian(location=500.0, scale=200.0, heteroscedastic=heteroscedastic)
    inputs = data()[0]
    targets = 500 + 200 * torch.randn(60, 2)
    networks = [small_net(seed, 4 if heteroscedastic else 2) for seed in range(2)]
    posterior = scaled(mola.fit(networks, [(inputs, targets)], likelihood=likelihood, progress=False))
    outputs = REGRESSION_OUTPUTS + MORE_REGRESSION_OUTPUTS
    getattr(mola.export, exporter)(posterior, tmp_path / "file", inputs[:4], outputs=outputs)
    compare_file(tmp_path / "file", posterior)
    with pytest.raises(OptionError, match="outputs must be one or more of mean"):
        check_outputs(["probs"], posterior)
    assert check_outputs(None, posterior) == REGRESSION_OUTPUTS


@pytest.mark.parametrize(
    ("exporter", "build", "shape"),
    [
        ("torch_export", lambda: nn.Sequential(nn.Linear(SIDE, 6), nn.Tanh(), nn.Linear(6, 3)), (1, SIDE)),
        pytest.param(
            "onnx",
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1)),
            (6, 6),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sequence", "image"],
)
def test_dense_outputs_keep_their_layout(exporter, build, shape, tmp_path):
    inputs = data()[0]
    networks = [decided(build()) for _ in range(2)]
    posterior = scaled(mola.fit(networks, [(inputs, torch.randint(3, (60, *shape)))], progress=False))
    getattr(mola.export, exporter)(posterior, tmp_path / "file", inputs[:2])
    compare_file(tmp_path / "file", posterior)


# --- torch.export --------------------------------------------------------------------------------------------------------


def test_a_program_of_torch_export_comes_back(tmp_path):
    """Also without molaplace's reader, and without the example: a file that is given away should not hold anyone's data."""
    posterior = fitted(count=2, structure="full", link=mola.links.MonteCarlo(20))
    example = torch.full((2, 1, SIDE, SIDE), 0.123456789, dtype=torch.float32)
    options = {"classes": list("abcde"), "outputs": ["probs", "epistemic", "ood_score"]}
    mola.export.torch_export(posterior, tmp_path / "file.pt2", example, **options)
    compare_file(tmp_path / "file.pt2", posterior)
    assert mola.export.load(tmp_path / "file.pt2", trust=True).classes == list("abcde")
    with pytest.raises(OptionError, match="can run code"):
        mola.export.load(tmp_path / "file.pt2")
    with torch.no_grad():
        compare(torch.export.load(tmp_path / "file.pt2").module()(data(3)[0]), posterior, data(3)[0])
    assert example[0, 0, 0, :2].numpy().tobytes() not in (tmp_path / "file.pt2").read_bytes()


# --- refusals ------------------------------------------------------------------------------------------------------------


def no_files(folder) -> bool:
    return not list(folder.iterdir())


CALLS: list[int] = []


class Odd(nn.Module):
    """Networks with one step that exports cannot express."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.head = nn.Linear(SIDE * SIDE, CLASSES, dtype=torch.float32)

    def forward(self, inputs):
        flat = inputs.flatten(1)
        if self.kind == "branching":
            flat = flat if float(flat.sum()) > 0 else 2 * flat
        elif self.kind == "special":
            flat = torch.special.bessel_j0(flat)
        elif self.kind == "drifting":
            CALLS.append(1)
            flat = flat * len(CALLS)
        elif self.kind == "undefined" and torch.compiler.is_compiling():
            flat = flat * torch.nan
        return self.head(flat)


@pytest.mark.parametrize(
    ("kind", "write", "words"),
    [
        ("branching", "torch_export", "cannot trace Odd.*branch on"),
        ("special", "onnx", "bessel_j0.*torch_export"),
        ("drifting", "torch_export", "differ from PyTorch.*only on their inputs"),
        ("undefined", "torch_export", "differ from PyTorch.*probs by inf"),
    ],
)
def test_a_network_that_cannot_be_exported(kind, write, words, tmp_path):
    posterior = mola.fit(Odd(kind).eval(), [data(2)], progress=False)
    with pytest.raises(ExportError, match=words):
        getattr(mola.export, write)(posterior, tmp_path / "file", data(2)[0], outputs=["probs"])
    assert no_files(tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onnxruntime.*molaplace\[export\]"):
        mola.export.onnx(fitted(), tmp_path / "file.onnx", data(2)[0])


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("text", "example must be one batch as a tensor"),
        (torch.zeros(0, 1, SIDE, SIDE), r"batch size \(at least 1\)"),
        ((torch.zeros(2, 3), torch.zeros(3, 3)), "same batch size"),
        (torch.full((2, 1, SIDE, SIDE), torch.nan), "NaN"),
        (torch.zeros(2, 1, SIDE, SIDE, dtype=torch.float64), "type float64"),
    ],
)
def test_an_example_that_cannot_be_used(example, words):
    with pytest.raises(DataError, match=words):
        trace(fitted(), example)


def test_options_that_cannot_be_used(tmp_path):
    posterior = fitted()
    inputs = data(2)[0]
    path = tmp_path / "file.onnx"
    with pytest.raises(OptionError, match=r"got Mixture.*mola\.fit"):
        mola.export.onnx(mola.Mixture([posterior]), path, inputs)
    for options, words in (
        ({"classes": ["a", "b"]}, "5 different names"),
        ({"outputs": ["label", "mutual_information"]}, "got mutual_information"),
    ):
        with pytest.raises(OptionError, match=words):
            mola.export.onnx(posterior, path, inputs, **options)
    with pytest.raises(OptionError, match="std must be finite and above 0"):
        Pixels((0.5,), (0.0,))
    for wrong in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(StorageError, match="a file in an existing folder"):
            mola.export.torch_export(posterior, wrong, inputs)
    assert no_files(tmp_path)


def test_foreign_and_damaged_files(tmp_path, several):
    (tmp_path / "a").write_bytes(b"PK nothing")
    (tmp_path / "b").write_bytes(b"nothing")
    for name, words in (("a", "not a torch.export file"), ("b", "not an ONNX file"), ("c", "No such file")):
        with pytest.raises(StorageError, match=words):
            mola.export.load(tmp_path / name, trust=True)
    document = {f"molaplace.{name}": json.dumps(value) for name, value in several.written.document.items()}
    assert document_of(document | {"own": "1"}, "file") == several.written.document
    for change, words in (
        ({"molaplace.format_version": "2"}, "format version 2"),
        ({"molaplace.format_version": "[" * 5000}, "not readable JSON"),
        ({"molaplace.classes": "3"}, "damaged at 'classes'"),
        ({"molaplace.ood_threshold": '"high"'}, "damaged at 'ood_threshold'"),
    ):
        with pytest.raises(StorageError, match=words):
            document_of(document | change, "file")
    with pytest.raises(StorageError, match="not exported by molaplace"):
        document_of({}, "file")
    run = mola.export.load(several.path)
    for inputs, words in (
        (torch.zeros(2, 1, SIDE + 1, SIDE), "with shapes"),
        ({"input": torch.zeros(2)}, "one tensor"),
    ):
        with pytest.raises(DataError, match=words):
            run(inputs)
