"""Exported files give what `posterior.predict` gives: every structure and link, any batch, with PyTorch and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import mola
from mola.errors import DataError, ExportError, MissingExtraError, OptionError, StorageError
from mola.export import OUTPUTS, Exported, Pixels
from mola.export.graph import Signature, check_outputs
from mola.export.tracing import Settings, in_half_precision, trace
from mola.links import as_link
from tests.closeness import assert_close
from tests.conftest import CLOSED_FORM_LINKS, STRUCTURES

CLASSES = 5
SIDE = 8


def decided(net: nn.Sequential) -> nn.Module:
    """Logits of several units: near a uniform prediction all numbers agree, and tests would see nothing."""
    with torch.no_grad():
        net[-1].weight.mul_(8)
    return net.eval()


def small_net(seed: int, *, bias: bool = True) -> nn.Module:
    """Two layers: what lies in front of the head is the same in every export."""
    torch.manual_seed(seed)
    return decided(nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 7), nn.Tanh(), nn.Linear(7, CLASSES, bias=bias)))


def conv_net(seed: int) -> nn.Module:
    """Convolutions with batch normalisation that has seen data, pooling, and a wide head."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)),
    )
    net(torch.randn(50, 1, SIDE, SIDE) * 2 + 1)
    return decided(net)


def lenet_like(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return decided(
        nn.Sequential(
            *(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 12), nn.ReLU()),
            nn.Linear(12, CLASSES),
        )
    )


def data(count: int = 60, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 1, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def fitted(make, count: int = 1, *, dtype: torch.dtype = torch.float32, **options) -> mola.MoLA:
    networks = [make(seed).to(dtype) for seed in range(count)]
    return mola.fit(networks, [data(dtype=dtype)], progress=False, **options)


def cooled(posterior: mola.MoLA) -> mola.MoLA:
    """The same with a temperature and with cooling by distance; how it was tuned, and what is usual, stay."""
    return posterior._with(cooling=replace(posterior.cooling, temperature=0.8, exponent=1.5))


def expected(posterior: mola.MoLA, inputs) -> dict[str, torch.Tensor]:
    prediction = posterior.predict(inputs)
    found = {name: getattr(prediction, "probs" if name == "probabilities" else name) for name in OUTPUTS}
    return {name: value for name, value in found.items() if value is not None}


def compare(found, posterior, inputs, tolerance: float = 1e-5) -> None:
    wanted = expected(posterior, inputs)
    for name, value in found.items():
        assert value.shape == wanted[name].shape, name
        # Outlier scores and distances have no upper end.
        difference = (value.double() - wanted[name].double()).abs() / wanted[name].double().abs().clamp_min(1)
        assert float(difference.detach().max()) <= tolerance, name


def compare_file(path, posterior, tolerance: float = 1e-5, sizes=(1, 3, 17)) -> None:
    run = mola.load_exported(path, trust=True)
    for size in sizes:
        inputs = data(size, seed=size)[0]
        compare(run(inputs), posterior, inputs, tolerance)


# --- the graph is the posterior ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "bias"), [(1, False), (3, True)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_graph_is_the_prediction_for_every_link(structure, count, bias):
    """In float64, to rounding."""
    base = fitted(lambda seed: small_net(seed, bias=bias), count, dtype=torch.float64, structure=structure)
    base = base.with_prior_precision([0.1 + k for k in range(count)]).with_weights(
        [(k + 1) / (count * (count + 1) / 2) for k in range(count)]
    )
    inputs = 2 * data(11, seed=3, dtype=torch.float64)[0]
    for link in (*CLOSED_FORM_LINKS, mola.Bridge(normalised=True), "mc", mola.MonteCarlo(30, "weights", seed=4)):
        plain = base.with_link(link)
        for posterior in (plain, plain.with_temperature(0.8), cooled(plain)):
            with torch.no_grad():
                found = Exported(posterior, Signature.of(inputs, posterior.networks[0]))(inputs)
            assert tuple(found) == OUTPUTS
            compare(found, posterior, inputs, 1e-9)
            # A normalised bridge sees ratios alone, which no divisor changes.
            unmoved = posterior is plain or link == mola.Bridge(normalised=True)
            assert torch.allclose(posterior(inputs), plain(inputs), atol=1e-3) == unmoved


def test_the_graph_holds_only_constants_that_it_needs():
    posterior = fitted(small_net, structure="kron-exact", link="probit")
    traced = trace(posterior, data(2)[0], Settings(outputs=["probabilities"]))
    held = [
        name for name in (*traced.program.graph_signature.buffers, *traced.program.constants) if "constants" in name
    ]
    assert {name.split(".")[-1] for name in held} == {"feature_vectors", "class_table"}


@pytest.mark.parametrize(
    ("write", "output"), [(mola.export_onnx, "probabilities"), (mola.export_torch, "ood_score")], ids=["onnx", "torch"]
)
def test_equal_posteriors_give_equal_files_also_where_distances_are_known_and_not_used(write, output, tmp_path):
    """Byte for byte, with an output that both have."""
    files = []
    for distances in (True, False):
        posterior = fitted(small_net, prior_precision=0.3, distances=distances)
        written = write(posterior, tmp_path / f"{distances}", data(2)[0], outputs=[output], check=False)
        files.append(written.path.read_bytes())
    assert files[0] == files[1]


def test_only_posteriors_with_distances_have_that_output(tmp_path):
    without, plain = fitted(small_net, distances=False), mola.ensemble(small_net(0).float())
    for posterior, words in (
        (without, "has no distances from the training classes"),
        (plain, "a plain ensemble has no"),
    ):
        assert check_outputs(None, posterior) == OUTPUTS[:-1]
        with pytest.raises(OptionError, match=f"'distance' cannot be given: .*{words}"):
            mola.export_torch(posterior, tmp_path / "file.pt2", data(2)[0], outputs=["label", "distance"])
    assert check_outputs(None, fitted(small_net)) == OUTPUTS
    assert no_files(tmp_path)


def test_very_many_classes_make_one_table(monkeypatch):
    """Where the library makes class means in portions, so as not to hold a second table, a graph has one in its own precision."""
    inputs = data(9, seed=3)[0]
    posterior = cooled(fitted(small_net))
    with torch.no_grad():
        wanted = posterior(inputs)
    monkeypatch.setattr("mola.laplace.distance.KEPT", 0)
    monkeypatch.setattr("mola.laplace.distance.AT_ONCE", 14)
    posterior = cooled(fitted(small_net))
    traced = trace(posterior, inputs, Settings(outputs=["probabilities", "distance"]))
    with torch.no_grad():
        compare(traced.program.module()(inputs), posterior, inputs)
        assert_close(posterior(inputs), wanted)
    tables = [one for one in traced.program.constants.values() if one.shape == (CLASSES, 7)]
    assert [one.dtype for one in tables] == [torch.float32]


def test_networks_are_left_as_they_were(tmp_path):
    posterior = fitted(conv_net)
    network = posterior.networks[0].train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    written = mola.export_torch(posterior, tmp_path / "file.pt2", data(2)[0], float16=True, outputs=["label"])
    assert written.document["float16"] is True
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not network[-1]._forward_hooks
    assert next(network.parameters()).dtype == torch.float32


# --- ONNX ----------------------------------------------------------------------------------------------------------------


class OwnLink(mola.Link):
    """A link of the user's own: halfway between two of ours."""

    name = "own"
    needs_covariance = True

    def __call__(self, moments, seed=None):
        return (as_link("probit")(moments, seed) + as_link("bridge")(moments, seed)) / 2

    def settings(self):
        return {}


@pytest.mark.parametrize(
    ("structure", "link"),
    [
        pytest.param("kron-exact", OwnLink(), marks=pytest.mark.slow),
        pytest.param("kron-diag", "probit-centered", marks=pytest.mark.slow),
        pytest.param("diag", "mean-field", marks=pytest.mark.slow),
        pytest.param("full", "bridge", marks=pytest.mark.slow),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_onnxruntime_gives_pytorch_s_outputs(structure, link, tmp_path):
    """Far below 1e-5. Kron with probit, and networks with convolutions: `several`."""
    posterior = cooled(fitted(small_net, structure=structure, prior_precision=0.3, link=link))
    # Labels, confidence and entropy are made of the probabilities, whatever the structure and the link.
    outputs = ["probabilities", "mutual_information", "ood_score", "distance"]
    written = mola.export_onnx(posterior, tmp_path / "file.onnx", data(4)[0], outputs=outputs)
    assert max(written.differences.values()) < 2.5e-6
    compare_file(tmp_path / "file.onnx", posterior, 2.5e-6)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Three networks of two architectures and widths, tuned and cooled, with everything that can be told."""
    networks = [(lenet_like if k % 2 else conv_net)(k).float() for k in range(3)]
    inputs, labels = data()
    posterior = mola.fit(networks, [(inputs, labels)], weights=[0.2, 0.5, 0.3], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mola.MolaWarning)  # labels at random: the best prior is at an end of the grid
        rule = mola.ValidationScore("nll", grid=[0.1, 0.3, 1.0])
        posterior = cooled(posterior.tune([data(40, seed=1)], rule, progress=False))
    path = tmp_path_factory.mktemp("several") / "several.onnx"
    names = ["owl", "cat", "dog", "élan", "fox"]
    told = {"metadata": {"author": "us", "run": {"seed": 3}}, "ood_threshold": -0.25}
    written = mola.export_onnx(posterior, path, inputs[:1], classes=names, **told)
    return SimpleNamespace(posterior=posterior, path=path, written=written, names=names, inputs=inputs)


def test_networks_of_two_kinds_at_any_batch_size(several):
    compare_file(several.path, several.posterior, sizes=(1, 2, 3, 17, 64))


def test_a_file_tells_all_about_itself(several):
    model = onnx.load(several.path)
    onnx.checker.check_model(model, full_check=True)
    assert [one.name for one in model.graph.input] == ["input"]
    assert [one.name for one in model.graph.output] == list(OUTPUTS)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert all(not one.external_data for one in model.graph.initializer)
    told = {one.key: one.value for one in model.metadata_props}
    assert told["author"] == "us"
    assert json.loads(told["run"]) == {"seed": 3}
    mine = {key.removeprefix("mola."): json.loads(value) for key, value in told.items() if key.startswith("mola.")}
    assert mine["classes"] == several.names
    assert mine["prior_precision"] == list(several.posterior.prior_precision)
    assert mine["weights"] == pytest.approx([0.2, 0.5, 0.3])
    assert (mine["structure"], mine["link"]) == ("kron", {"name": "probit"})
    assert mine["rule"] == several.posterior.tuning.rule
    assert (mine["temperature"], mine["distance_exponent"]) == (0.8, 1.5)
    assert (mine["ood_score"], mine["ood_threshold"]) == (
        several.posterior.predict(several.inputs).ood_score_name,
        -0.25,
    )
    assert "distance" in mine["ood_score"]
    assert (mine["version"], mine["format_version"]) == (mola.__version__, 1)
    loaded = mola.load_exported(several.path)
    assert (loaded.classes, loaded.outputs, loaded.metadata["author"]) == (several.names, list(OUTPUTS), "us")
    assert [(one.name, one.shape) for one in several.written.outputs[:2]] == [
        ("probabilities", ("batch", 5)),
        ("label", ("batch",)),
    ]


def test_a_file_holds_no_word_of_where_it_was_made(several):
    content = several.path.read_bytes()
    for word in (str(Path.cwd()), str(Path.home()), "site-packages", ".py"):
        assert word.encode() not in content


def test_the_file_runs_where_there_is_no_torch(several, tmp_path):
    inputs = data(9, seed=5)[0]
    wanted = expected(several.posterior, inputs)
    np.savez(tmp_path / "wanted.npz", inputs=inputs.numpy(), **{name: value.numpy() for name, value in wanted.items()})
    code = """
        import sys
        for name in ("torch", "mola", "onnx", "onnxscript"):
            sys.modules[name] = None  # an import of it fails
        import json, numpy as np, onnxruntime
        session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
        stored = np.load(sys.argv[2])
        names = [one.name for one in session.get_outputs()]
        found = dict(zip(names, session.run(names, {"input": stored["inputs"]})))
        classes = json.loads(session.get_modelmeta().custom_metadata_map["mola.classes"])
        print(max(float(np.abs(found[name] - stored[name]).max()) for name in names), classes[found["label"][0]])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(several.path), str(tmp_path / "wanted.npz")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    difference, name = ran.stdout.split()
    assert float(difference) <= 1e-5
    assert name == several.names[int(wanted["label"][0])]


def test_a_plain_ensemble_is_exported_too(tmp_path):
    members = [small_net(seed).float() for seed in range(2)]
    posterior = mola.ensemble(members, weights=[0.75, 0.25]).with_temperature(0.8)
    told = {"outputs": ["probabilities", "mutual_information", "ood_score"]}
    written = mola.export_onnx(posterior, tmp_path / "file.onnx", data(2)[0], **told)
    assert (written.document["structure"], written.document["ood_score"]) == (None, "max-probability")
    compare_file(tmp_path / "file.onnx", posterior)


def test_half_precision_networks(tmp_path):
    """Equal to PyTorch's own half precision as far as that has digits: runtimes round between layers at other places."""
    posterior, inputs = cooled(fitted(conv_net)), data(40, seed=2)[0]
    outputs = ["probabilities", "distance"]
    written = mola.export_onnx(posterior, tmp_path / "half.onnx", inputs[:2], float16=True, outputs=outputs)
    assert [one.dtype for one in written.inputs] == ["float32"]
    found = mola.load_exported(tmp_path / "half.onnx")(inputs)
    assert found["probabilities"].dtype == torch.float32
    compare(found, in_half_precision(posterior), inputs.half(), 4e-3)
    compare(found, posterior, inputs, 1e-2)
    assert not torch.equal(found["probabilities"], posterior(inputs))
    kinds = {one.data_type for one in onnx.load(tmp_path / "half.onnx").graph.initializer if len(one.dims) == 4}
    assert kinds == {onnx.TensorProto.FLOAT16}


class TwoInputs(nn.Module):
    """As in transformers: named inputs, one of them integers, and an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

    def forward(self, input_ids, attention_mask=None, scale=1.0):
        values = self.embedding(input_ids) * scale
        if attention_mask is not None:
            values = values * attention_mask[:, :, None]
        return SimpleNamespace(logits=self.head(values.mean(1)))


@pytest.mark.parametrize(("form", "write"), [("mapping", mola.export_onnx), ("tuple", mola.export_torch)])
def test_inputs_by_name_and_by_position(form, write, tmp_path):
    torch.manual_seed(0)
    tokens, mask = torch.randint(20, (30, 9)), torch.randint(2, (30, 9)).float()
    shaped = {"mapping": lambda rows: {"input_ids": tokens[rows], "attention_mask": mask[rows], "scale": 2.0}}
    shaped["tuple"] = lambda rows: (tokens[rows], mask[rows])
    every = slice(None)
    network = TwoInputs().float().eval()
    posterior = mola.fit(network, [(shaped[form](every), torch.randint(CLASSES, (30,)))], progress=False)
    written = write(posterior, tmp_path / "file", shaped[form](slice(0, 2)), outputs=["probabilities", "entropy"])
    assert [(one.name, one.dtype) for one in written.inputs] == [("input_ids", "int64"), ("attention_mask", "float32")]
    loaded = mola.load_exported(tmp_path / "file", trust=form == "tuple")
    for rows in (slice(0, 1), slice(3, 14)):
        compare(
            loaded(shaped[form](rows)), posterior, shaped[form](rows) if form == "mapping" else [(shaped[form](rows),)]
        )


def test_bytes_in_probabilities_out(tmp_path):
    posterior = fitted(small_net)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (6, 1, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    preparation = Pixels((0.3,), (0.2,))
    written = mola.export_onnx(
        posterior, tmp_path / "f.onnx", pixels, outputs=["probabilities"], preparation=preparation
    )
    assert written.inputs[0].dtype == "uint8"
    found = mola.load_exported(tmp_path / "f.onnx")(pixels.numpy())
    compare(found, posterior, (pixels.float() / 255 - 0.3) / 0.2)


# --- torch.export --------------------------------------------------------------------------------------------------------


def test_a_program_of_torch_export_comes_back(tmp_path):
    posterior = fitted(small_net, 2, structure="full", link=mola.MonteCarlo(20))
    told = {"classes": list("abcde"), "outputs": ["probabilities", "mutual_information", "ood_score"]}
    mola.export_torch(posterior, tmp_path / "file.pt2", data(1)[0], **told)
    compare_file(tmp_path / "file.pt2", posterior)
    assert mola.load_exported(tmp_path / "file.pt2", trust=True).classes == list("abcde")
    plain = torch.export.load(tmp_path / "file.pt2").module()  # without mola's reader
    with torch.no_grad():
        compare(plain(data(3)[0]), posterior, data(3)[0])


def test_a_program_holds_no_example(tmp_path):
    """A file that is given away should not carry somebody's data."""
    inputs = torch.full((2, 1, SIDE, SIDE), 0.123456789, dtype=torch.float32)
    mola.export_torch(fitted(small_net), tmp_path / "file.pt2", inputs, check=False, outputs=["label"])
    assert inputs[0, 0, 0, :2].numpy().tobytes() not in (tmp_path / "file.pt2").read_bytes()


# --- what cannot be done is told ------------------------------------------------------------------------------------------


def no_files(folder) -> bool:
    return [path.name for path in folder.iterdir()] == []


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIDE * SIDE, CLASSES)

    def forward(self, inputs):
        flat = inputs.flatten(1)
        return self.head(flat if float(flat.sum()) > 0 else 2 * flat)


class FixedBatch(Branching):
    def forward(self, inputs):
        return self.head(inputs.reshape(2, SIDE * SIDE))


@pytest.mark.parametrize(("network", "words"), [(Branching, "branch on"), (FixedBatch, "any size")])
def test_a_network_that_cannot_be_traced_says_why(network, words, tmp_path):
    inputs, labels = data(2)
    posterior = mola.fit(network().float().eval(), [(inputs, labels)], progress=False)
    with pytest.raises(ExportError, match=f"cannot trace {network.__name__}.*{words}"):
        mola.export_torch(posterior, tmp_path / "file.pt2", inputs)
    assert no_files(tmp_path)


class Special(Branching):
    def forward(self, inputs):
        return self.head(torch.special.bessel_j0(inputs).flatten(1))


def test_a_step_that_onnx_does_not_know_is_named(tmp_path):
    posterior = mola.fit(Special().float().eval(), [data()], progress=False)
    with pytest.raises(ExportError, match=r"bessel_j0.*export_torch"):
        mola.export_onnx(posterior, tmp_path / "file.onnx", data(2)[0], outputs=["label"])
    assert no_files(tmp_path)


CALLS: list[int] = []


class Drifting(Branching):
    def forward(self, inputs):
        CALLS.append(1)
        return self.head(inputs.flatten(1) * len(CALLS))


def test_a_file_that_disagrees_is_not_kept(tmp_path):
    posterior = mola.fit(Drifting().float().eval(), [data()], progress=False)
    with pytest.raises(ExportError, match=r"disagrees with PyTorch.*more than its inputs"):
        mola.export_torch(posterior, tmp_path / "file.pt2", data(2)[0], outputs=["probabilities"])
    assert no_files(tmp_path)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*mola-torch\[export\]"):
        mola.export_onnx(fitted(small_net), tmp_path / "file.onnx", data(2)[0])


def test_paths_that_cannot_be_written_are_found_out_first(tmp_path):
    posterior, inputs = fitted(small_net), data(2)[0]
    for write in (mola.export_onnx, mola.export_torch):
        with pytest.raises(StorageError, match="no folder"):
            write(posterior, tmp_path / "missing" / "file", inputs)
        with pytest.raises(StorageError, match="is a folder"):
            write(posterior, tmp_path, inputs)
    assert no_files(tmp_path)


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.pt2"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        mola.export_torch(fitted(small_net), path, data(2)[0], check=False, outputs=["label"])
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file.pt2"]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ("text", "expected one batch as a tensor"),
        ([[torch.zeros(2)]], "nested"),
        (torch.zeros(0, 1, SIDE, SIDE), "at least one row"),
        ((torch.zeros(2, 3), torch.zeros(3, 3)), "batch as first axis"),
        (torch.full((2, 1, SIDE, SIDE), torch.nan), "NaN"),
        (torch.zeros(2, 1, SIDE, SIDE + 1), "failed on inputs of shape"),
        (torch.zeros(2, 1, SIDE, SIDE, dtype=torch.float64), "type float64"),
    ],
)
def test_an_example_that_is_none_is_refused(example, words, tmp_path):
    with pytest.raises(DataError, match=words):
        mola.export_torch(fitted(small_net), tmp_path / "file.pt2", example)
    assert no_files(tmp_path)


def test_options_that_cannot_be_used_are_refused(tmp_path):
    posterior, inputs, path = fitted(small_net), data(2)[0], tmp_path / "file.onnx"
    with pytest.raises(OptionError, match="Mixture"):
        mola.export_onnx(mola.Mixture([lambda x: x]), path, inputs)
    with pytest.raises(OptionError, match="5 different names"):
        mola.export_onnx(posterior, path, inputs, classes=["a", "b"], outputs=["label"])
    with pytest.raises(OptionError, match=r"begin with 'mola\.'"):
        mola.export_onnx(posterior, path, inputs, metadata={"mola.classes": "x"})
    with pytest.raises(OptionError, match="from 18 to 23"):
        mola.export_onnx(posterior, path, inputs, opset=7, outputs=["label"])
    with pytest.raises(OptionError, match=r"got risk"):
        check_outputs(["label", "risk"], posterior)
    with pytest.raises(OptionError, match="got none"):
        check_outputs([], posterior)
    with pytest.raises(OptionError, match="positive standard deviations"):
        Pixels((0.5,), (0.0,))
    mixed = mola.MoLA([*posterior.components, *mola.ensemble(small_net(1).float()).components])
    with pytest.raises(OptionError, match="some components have curvature"):
        mola.export_onnx(mixed, path, inputs)
    assert no_files(tmp_path)


def test_files_of_others_are_refused(tmp_path, several):
    (tmp_path / "a").write_bytes(b"PK nothing")
    (tmp_path / "b").write_bytes(b"nothing")
    for name, words in (("a", "not a program of torch.export"), ("b", "neither an ONNX"), ("c", "no such file")):
        with pytest.raises(StorageError, match=words):
            mola.load_exported(tmp_path / name, trust=True)
    model = onnx.load(several.path)
    kept = {one.key: one.value for one in model.metadata_props}
    for change, words in (({}, "not exported by mola"), (kept | {"mola.format_version": "2"}, "format version 2")):
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, change)
        onnx.save(model, tmp_path / "d")
        with pytest.raises(StorageError, match=words):
            mola.load_exported(tmp_path / "d")


def test_wrong_inputs_of_a_file_are_told(several):
    run = mola.load_exported(several.path)
    with pytest.raises(DataError, match="cannot take inputs of shapes"):
        run(torch.zeros(2, 1, SIDE + 1, SIDE, dtype=torch.float32))
    with pytest.raises(DataError, match="expected one tensor"):
        run({"input": torch.zeros(2)})


def test_nan_in_is_nan_out(several):
    inputs = several.inputs[:3].clone()
    inputs[1] = torch.nan
    found = mola.load_exported(several.path)(inputs)
    for name in ("probabilities", "confidence", "entropy", "mutual_information", "ood_score", "distance"):
        assert found[name].isnan().flatten(1 if found[name].dim() > 1 else 0).reshape(3, -1).any(1).tolist() == [
            False,
            True,
            False,
        ]
