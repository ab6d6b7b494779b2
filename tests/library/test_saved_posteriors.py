"""A saved posterior comes back bit for bit, on the networks it was fitted on and on no others."""

import copy

import pytest
import torch
from safetensors.torch import load
from torch import nn

import molaplace as mola
from molaplace.component import Component
from molaplace.errors import OptionError, StorageError
from molaplace.likelihoods import Bernoulli, Categorical, Gaussian
from molaplace.links import Bridge, CentredProbit, MeanField, MonteCarlo, Probit
from molaplace.posterior import MoLA
from molaplace.rules import Tuning
from molaplace.settings import FeatureScale, Reference, Settings
from molaplace.structures import Diag, Full, Kron, KronDiag, KronExact
from tests.closeness import assert_close
from tests.saved_files import edit

X = torch.randn(23, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(23) % 3
FAR = 4 * torch.randn(8, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def plain(seed=0, width=4, outputs=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, outputs, bias=seed != 1)).double()


def posterior(networks, structure="kron", likelihood="categorical", link="probit", weights="uniform", **options):
    labels = options.get("labels", Y)
    distances = options.get("distances", True)
    fitted = mola.fit(
        networks,
        [X if labels is None else (X, labels)],
        structure=structure,
        likelihood=likelihood,
        prior_precision=[0.1, 2 / 3, 1e-17][: len(networks)],
        distances=distances,
    )
    changes = {name: options[name] for name in ("settings", "reference", "tuning") if name in options}
    return fitted.with_link(link).with_weights(weights).with_parts(**changes)


def three(outputs=3):
    return [plain(0, outputs=outputs), plain(1, 6, outputs), plain(2, 3, outputs)]


def assert_same(first, second):
    with torch.no_grad():
        assert_close(first(FAR), second(FAR), "float64")
    for name in ("settings", "weighting", "link", "tuning", "reference", "fingerprint"):
        assert getattr(first, name) == getattr(second, name), name
    assert torch.equal(first.weights, second.weights)
    for left, right in zip(first.components, second.components, strict=True):
        assert (left.network, left.head, left.likelihood) == (right.network, right.head, right.likelihood)
        assert left.layer.structure == right.layer.structure
        sums = left.layer.sums
        others = right.layer.sums
        assert (sums.count, sums.log_likelihood) == (others.count, others.log_likelihood)
        assert sums.tensors.keys() == others.tensors.keys()
        assert all(torch.equal(tensor, others.tensors[name]) for name, tensor in sums.tensors.items())
        assert torch.equal(left.layer.weights, right.layer.weights)
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    drawn = [mixture.sample(5, generator=seed).weights for mixture, seed in zip((first, second), seeds, strict=True)]
    for left, right in zip(*drawn, strict=True):
        assert_close(left, right, "float64")


STRUCTURES = [Kron(), KronExact(), KronDiag(), Diag(), Full(), Kron(running_average=0.9)]
LINKS = [
    CentredProbit(),
    MeanField(),
    Bridge(),
    Bridge(normalised=True),
    MonteCarlo(samples=7, over="weights", seed=5),
]
REFERENCE = Reference(
    (FeatureScale(1.5, 2.5),) * 3, ((0.1, 1.0), (-2.0, 0.5), (0.3, 1 / 3)), energies=(-1.0, -2.0, -1 / 3)
)


def tuned():
    settings = Settings((0.1, 2 / 3, 1e-17), 0.7, 0.25, 2.0, 1.25)
    curve = {"prior_precision": (0.1, 0.2), "nll": (1 / 3, 0.5)}
    tuning = Tuning(rule="Calibrated()", settings=settings, curve=curve, notes=("a note",))
    return {"tuning": tuning, "settings": settings, "reference": REFERENCE}


TARGETS = 3 + 2 * X[:, :2]
LIKELIHOODS = {
    "bernoulli": (Bernoulli(), 3, (X[:, :3] > 0).double()),
    "regression": (Gaussian(location=[3.0, 3.0], scale=2.0), 2, TARGETS),
    "given noise": (Gaussian(noise=[0.5, 0.25]), 2, TARGETS),
    "heteroscedastic": (Gaussian(heteroscedastic=True, order="interleaved"), 4, TARGETS),
}
ROUND_TRIPS = {
    **{f"{structure}": {"structure": structure} for structure in STRUCTURES},
    **{f"{link}": {"link": link, "weights": [0.1, 0.2, 0.7]} for link in LINKS},
    "evidence": {"weights": "evidence"},
    "no labels": {"labels": None},
    "no distances": {"distances": False},
    "tuned": {"weights": [0.2, 0.3, 0.5], **tuned()},
    **{
        f"{name}, {structure}": {"structure": structure, "likelihood": likelihood, "outputs": outputs, "labels": labels}
        for structure in STRUCTURES[:5]
        for name, (likelihood, outputs, labels) in LIKELIHOODS.items()
    },
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_posterior_comes_back_bit_for_bit(name, tmp_path):
    options = dict(ROUND_TRIPS[name])
    networks = three(options.pop("outputs", 3))
    saved = posterior(networks, **options)
    folder = saved.save(tmp_path / "deep" / "folder")
    (file,) = folder.glob("[!.]*")
    before = file.read_bytes()
    loaded = mola.load(str(folder), networks)
    assert_same(loaded, saved)
    assert_same(loaded.with_prior_precision(3.0), saved.with_prior_precision(3.0))
    assert_close(loaded.predict(FAR).ood_score, saved.predict(FAR).ood_score, "float64")
    assert loaded.save(folder) == folder
    assert [file.name] == ["posterior.safetensors"] == [path.name for path in folder.glob("[!.]*")]
    assert file.read_bytes() == before


@pytest.mark.parametrize("structure", STRUCTURES[:5], ids=str)
def test_the_files_hold_no_training_data(structure, tmp_path):
    network = plain()
    folder = posterior([network], structure).save(tmp_path)
    contents = [path.read_bytes() for path in folder.glob("[!.]*")]
    with torch.no_grad():
        hidden = [X, network[:2](X), network(X)]
    for values in hidden:
        for row in (*values.numpy(), *values.float().numpy()):
            assert not any(row.tobytes() in content for content in contents)
    for tensor in load(next(folder.glob("*.safetensors")).read_bytes()).values():
        assert len(X) not in tensor.shape


def test_what_cannot_be_saved_leaves_the_old_state(tmp_path):
    class MyLink(Probit):
        name = "mine"

    class MyKron(Kron):
        pass

    networks = three()
    saved = posterior(networks)
    saved.save(tmp_path)
    for other, words in (
        (posterior(networks, link=MyLink()), r"custom link \(MyLink\)"),
        (posterior(networks, MyKron()), r"custom structure \(MyKron\)"),
    ):
        with pytest.raises(StorageError, match=words):
            other.save(tmp_path)
    with pytest.raises(OptionError, match="plain ensemble"):
        MoLA([Component(networks[0], None, None, Categorical())]).save(tmp_path)
    assert_same(mola.load(tmp_path, networks), saved)


# --- the wrong network --------------------------------------------------------------------------------------------------


def test_networks_in_the_wrong_order_are_refused(tmp_path):
    first, second, third = networks = [plain(seed) for seed in (0, 2, 3)]
    posterior(networks).save(tmp_path)
    for order, words in (
        ([second, first, third], r"networks\[0\].*weights differ.*networks\[1\] has the saved"),
        ([first, third, second], r"networks\[1\].*networks\[2\] has the saved"),
        ([first, second, plain(9)], r"networks\[2\]: the weights differ"),
        ([first, second], "3 networks, got 2 networks"),
    ):
        with pytest.raises(StorageError, match=words):
            mola.load(tmp_path, order)


def changed(network):
    network[2].weight.data[1, 2] += 1e-15
    return network


OTHERS = {
    "another seed": (lambda _: plain(9), "weights differ"),
    "head, by one part in 1e15": (changed, "weights differ"),
    "another precision": (lambda network: network.float(), "weights differ.*precision"),
    "another number of classes": (lambda _: plain(outputs=5), "shapes"),
    "another name": (lambda network: nn.Sequential(network), "names"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_posterior_does_not_load_on_another_network(name, tmp_path):
    change, words = OTHERS[name]
    network = plain()
    posterior([network]).save(tmp_path)
    with pytest.raises(StorageError, match=rf"networks\[0\].*{words}"):
        mola.load(tmp_path, [change(copy.deepcopy(network))])
    mola.load(tmp_path, [copy.deepcopy(network).train()])  # the same weights in another object


# --- edited files -------------------------------------------------------------------------------------------------------


WRONG_SUMS = [torch.eye(4), torch.eye(6).float(), torch.full((6, 6), float("nan"))]


@pytest.mark.parametrize(
    ("name", "value"),
    [("1.gram", None), *((name, value) for name in ("1.gram", "1.class_counts") for value in WRONG_SUMS)],
    ids=str,
)
def test_replaced_tensors_are_refused(name, value, tmp_path):
    networks = three()
    posterior(networks).save(tmp_path)
    path = tmp_path / "posterior.safetensors"
    edit(path, lambda _, tensors: tensors.pop(name) if value is None else tensors.update({name: value}))
    with pytest.raises(StorageError, match=r"saved sums|Save the posterior again"):
        mola.load(tmp_path, networks)


@pytest.mark.parametrize("fitted", ["last layer", "loaded", "features", "whole", "tuned", "with new data"])
def test_a_posterior_remembers_the_weights_that_it_was_fitted_to(tmp_path, fitted):
    """Weights edited in place after the fit: neither a file nor a watch accepts them, whichever layer they belong to."""
    networks = [plain(seed) for seed in range(2)]
    loader = [(X, Y)]
    posterior = mola.whole.fit(networks, loader) if fitted == "whole" else mola.fit(networks, loader, progress=False)
    if fitted == "loaded":
        posterior = mola.load(posterior.save(tmp_path / "first"), networks)
    elif fitted == "features":
        features = [network[:2](X).detach() for network in networks]
        outputs = [network(X).detach() for network in networks]
        posterior = mola.fit_features(features, outputs, Y, [network[2] for network in networks])
        networks = list(posterior.networks)
    elif fitted == "tuned":
        posterior = posterior.with_prior_precision(2.0).reweight(loader)
    elif fitted == "with new data":
        posterior = posterior.add(loader).without(loader)
    folder = posterior.save(tmp_path / "posterior")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    parameter = next(networks[1].parameters())
    original = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[-1].mul_(1.001)
    words = r"networks\[1\]: the weights have changed since the posterior was fitted"
    with pytest.raises(StorageError, match=words):
        posterior.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    inputs = [(tuple(features), Y)] if fitted == "features" else loader
    for predictor in (posterior, mola.Mixture([posterior, posterior])):
        with pytest.raises(OptionError, match=words):
            mola.watch(predictor, inputs)
    if fitted not in ("whole", "features"):
        for change in (posterior.add, posterior.without):
            with pytest.raises(OptionError, match=words):
                change(loader)
    with torch.no_grad():
        parameter.copy_(original)
    posterior.save(folder)
    assert mola.watch(posterior, inputs).count == 0


def test_posteriors_are_added_if_they_were_fitted_to_the_same_weights():
    """What counts is the weights during the fit: they may have changed in between."""
    network = plain()
    first = mola.fit(network, [(X[:12], Y[:12])], progress=False)
    with torch.no_grad():
        network[0].weight.mul_(1.5)
    second = mola.fit(network, [(X[12:], Y[12:])], progress=False)
    with pytest.raises(OptionError, match="differ in their weights"):
        first + second


def test_a_posterior_converted_to_another_precision_remembers_the_rounded_weights():
    network = plain()
    posterior = mola.fit(network, [(X, Y)], progress=False).float()
    assert mola.watch(posterior, [(X.float(), Y)]).count == 0
    with torch.no_grad():
        network[0].weight.mul_(1.5)
    with pytest.raises(OptionError, match="have changed"):
        mola.watch(posterior, [(X.float(), Y)])


def test_a_head_that_was_trained_on_is_not_saved(tmp_path):
    network = nn.Linear(3, 2)
    inputs = torch.randn(40, 3)
    posterior = mola.fit(network, [(inputs, (inputs[:, 0] > 0).long())], progress=False)
    with torch.no_grad():
        network.weight.mul_(0.1)
    with pytest.raises(StorageError, match="changed since"):
        posterior.save(tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


def test_load_recognises_what_it_finds(tmp_path):
    pytest.importorskip("huggingface_hub", reason="NO HUGGINGFACE_HUB: `make setup` installs it")
    inputs = torch.randn(20, 3)
    network = nn.Linear(3, 2)
    saved = mola.fit(network, [(inputs, torch.arange(20) % 2)], progress=False)
    loaded = mola.load(mola.hub.save(saved, tmp_path / "hub"), network)
    assert_close(loaded(inputs), saved(inputs), "float64")
    with pytest.raises(OptionError, match="networks of the posterior in"):
        mola.load(saved.save(tmp_path / "plain"))
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(StorageError, match=r"mola\.export\.load\("):
        mola.load(tmp_path / "model.onnx", network)
