"""Files: what comes back is what went in, a crash loses nothing, and no file gets onto the wrong network."""

import copy
import hashlib
import json
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

import mola
from mola import StorageError
from mola.saving import storage
from tests.witness import unchanged

X = torch.randn(23, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(23) % 3
LOADER = [(X[:9], Y[:9]), (X[9:], Y[9:])]
FAR = 4 * torch.randn(8, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Named(nn.Module):
    """A network whose head has another name, and no bias."""

    def __init__(self, width):
        super().__init__()
        self.classifier, self.body = nn.Linear(width, 3, bias=False), nn.Linear(5, width)

    def forward(self, x):
        return {"logits": self.classifier(torch.tanh(self.body(x)))}


def plain(width=4, seed=0):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3)).double()
    network[2].weight.data *= 3  # as sure of itself as a trained one
    return network


def three():
    torch.manual_seed(7)
    return [plain(), Named(6).double(), plain(3, seed=1)]


def same_kind():
    return [plain(seed=seed) for seed in range(3)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same(first, second):
    """Bit for bit the same posterior."""
    assert torch.equal(first(FAR), second(FAR))
    one, two = first.predict(FAR), second.predict(FAR)
    for field in ("probs", "mutual_information", "ood_score", "logit_mean", "logit_variance"):
        assert torch.equal(getattr(one, field), getattr(two, field)), field
    assert first.prior_precision == second.prior_precision
    assert torch.equal(first.weights, second.weights)
    assert first.weighting == second.weighting
    assert first.link == second.link
    assert first.tuning == second.tuning
    for left, right in zip(first.components, second.components, strict=True):
        assert left.head.name == right.head.name
        assert left.curvature.structure.settings() == right.curvature.structure.settings()
        assert type(left.curvature.factors) is type(right.curvature.factors)
        assert left.curvature.factors.count == right.curvature.factors.count
        assert left.curvature.factors.log_likelihood == right.curvature.factors.log_likelihood
        for name, tensor in left.curvature.factors.saved().items():
            assert torch.equal(tensor, getattr(right.curvature.factors, name)), name
            assert tensor.dtype == getattr(right.curvature.factors, name).dtype
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    drawn = [one.sample(5, generator=seed).weights for one, seed in zip((first, second), seeds, strict=True)]
    assert all(torch.equal(left, right) for left, right in zip(*drawn, strict=True))


# --- there and back -----------------------------------------------------------------------------------------------------

STRUCTURES = {
    "kron": "kron",
    "kron-exact": "kron-exact",
    "kron-diag": "kron-diag",
    "diag": "diag",
    "full": "full",
    "kron, running average": mola.Kron(running_average=0.9),
    "kron-exact, running average": mola.KronExact(running_average=0.5),
    "full, bounded": mola.Full(memory=10**9),
}
LINKS = {
    "probit": "probit",
    "probit-centered": "probit-centered",
    "mean-field": "mean-field",
    "bridge": "bridge",
    "bridge, normalised": mola.Bridge(normalised=True),
    "mc": "mc",
    "mc, set": mola.MonteCarlo(samples=7, over="weights", seed=5),
}
WEIGHTS = {"uniform": "uniform", "evidence": "evidence", "given": [0.1, 0.2, 0.7]}
ROUND_TRIPS = [(structure, "probit", "uniform") for structure in STRUCTURES]
ROUND_TRIPS += [("kron", link, "given") for link in LINKS] + [("kron", "probit", weights) for weights in WEIGHTS]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("structure", "link", "weights"), ROUND_TRIPS)
def test_a_posterior_comes_back_bit_for_bit(structure, link, weights, count, tmp_path):
    networks = three()[:count]
    posterior = mola.fit(
        networks,
        LOADER,
        structure=STRUCTURES[structure],
        link=LINKS[link],
        weights=[1.0] if (count, weights) == (1, "given") else WEIGHTS[weights],
        prior_precision=[0.1, 2 / 3, 1e-17][:count],
    )
    folder = posterior.save(tmp_path / "deep" / "folder")
    with unchanged(*networks):
        loaded = mola.load(str(folder), networks if count > 1 else networks[0])
    assert all(one is two for one, two in zip(loaded.networks, networks, strict=True))
    assert_same(loaded, posterior)
    files = contents(folder)
    assert loaded.save(folder) == folder
    assert contents(folder) == files
    assert sorted(Path(name).suffix for name in files) == [".json", ".safetensors"]


def test_a_loaded_posterior_can_do_all_that_the_saved_one_could(tmp_path):
    networks = three()
    posterior = mola.fit(networks, LOADER, weights="evidence")
    loaded = mola.load(posterior.save(tmp_path), networks)
    assert_same(loaded.tune(rule=mola.Evidence()), posterior.tune(rule=mola.Evidence()))
    assert_same(loaded.reweight(LOADER), posterior.reweight(LOADER))
    assert_same(loaded.with_prior_precision(3.0), posterior.with_prior_precision(3.0))
    assert torch.equal(loaded.confidence_bound(FAR), posterior.confidence_bound(FAR))


def test_how_it_was_tuned_comes_back(tmp_path):
    networks = three()
    posterior = mola.fit(networks, LOADER).tune(LOADER, mola.ConfidenceThreshold(confidence=0.4))
    loaded = mola.load(posterior.save(tmp_path), networks)
    assert loaded.tuning == posterior.tuning
    assert loaded.tuning.rule.startswith("ConfidenceThreshold")
    assert len(loaded.tuning.curve["confidence"]) >= 100
    with warnings.catch_warnings(action="ignore", category=mola.MolaWarning):
        noted = mola.fit(networks, LOADER).tune(LOADER, mola.ConfidenceThreshold(confidence=0.999))
    assert any("no prior precision gives" in note for note in noted.tuning.notes)
    assert mola.load(noted.save(tmp_path), networks).tuning == noted.tuning


def test_a_posterior_without_labels_comes_back(tmp_path):
    network = plain()
    posterior = mola.fit(network, [x for x, _ in LOADER])
    loaded = mola.load(posterior.save(tmp_path), network)
    assert_same(loaded, posterior)
    with pytest.raises(mola.OptionError, match="needs training labels"):
        loaded.log_evidence()


def test_a_bare_layer_comes_back(tmp_path):
    network = nn.Linear(5, 3).double()
    posterior = mola.fit(network, LOADER)
    assert_same(mola.load(posterior.save(tmp_path), network), posterior)


def test_a_compiled_network_and_the_one_it_was_compiled_from_are_the_same_network(tmp_path):
    network = plain()
    compiled = torch.compile(network, backend="eager")
    expected = mola.fit(network, LOADER)
    for fitted, other in ((compiled, network), (network, compiled)):
        loaded = mola.load(mola.fit(fitted, LOADER).save(tmp_path), other)
        torch.testing.assert_close(loaded(FAR), expected(FAR), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrised_head_is_recognised(wrap, tmp_path):
    network = plain()
    wrap(network[2])
    posterior = mola.fit(network.train(), LOADER)
    with unchanged(network):
        assert_same(mola.load(posterior.save(tmp_path), network), posterior)


# --- what is in the files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", list(STRUCTURES)[:5])
def test_the_files_hold_no_training_data_and_do_not_grow_with_it(structure, tmp_path):
    network = plain()
    many = torch.randn(1009, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    labels = torch.arange(1009) % 3
    sizes = []
    for count in (101, 1009):
        posterior = mola.fit(network, [(many[:count], labels[:count])], structure=structure)
        folder = posterior.save(tmp_path / str(count))
        files = contents(folder)
        tensors = load(next(value for name, value in files.items() if name.endswith("safetensors")))
        assert all(count not in tensor.shape for tensor in tensors.values())
        with torch.no_grad():
            hidden = [many[:count], network[:2](many[:count]), network(many[:count])]
        for values in hidden:
            for row in (*values.numpy(), *values.float().numpy()):
                assert not any(row.tobytes() in content for content in files.values())
        sizes.append([len(content) for name, content in sorted(files.items())])
    assert sizes[0][0] == sizes[1][0]  # the tensors
    assert abs(sizes[0][1] - sizes[1][1]) < 20  # the digits of a count and of a sum


def test_the_document_is_readable_and_complete(tmp_path):
    networks = three()
    posterior = mola.fit(networks, LOADER, prior_precision=[1, 2, 3], weights=[0.5, 0.25, 0.25])
    document = json.loads((posterior.save(tmp_path) / "posterior.json").read_text())
    assert document["format"] == "mola-posterior"
    assert document["version"] == 1
    assert document["classes"] == 3
    assert document["weights"] == [0.5, 0.25, 0.25]
    assert [part["head"] for part in document["components"]] == ["2", "classifier", "2"]
    assert [part["prior_precision"] for part in document["components"]] == [1, 2, 3]
    assert [part["count"] for part in document["components"]] == [23] * 3
    assert [part["bias"] for part in document["components"]] == [True, False, True]


def test_nothing_is_pickled(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickled")

    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "dump"),
        (pickle, "dumps"),
        (pickle, "Unpickler"),
    ):
        monkeypatch.setattr(module, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    network = plain()
    mola.load(mola.fit(network, LOADER).save(tmp_path), network)
    for path in Path(mola.__file__).parent.rglob("*.py"):
        if path.name in ("storage.py", "archive.py", "posterior.py", "fitting.py"):
            text = path.read_text().replace(
                "network.load_state_dict(torch.load(", ""
            )  # in a message, with weights_only=True
            assert not re.search(r"import pickle|pickle\.|torch\.(load|save)\(|\beval\(|\bexec\(", text), path


# --- crashes ------------------------------------------------------------------------------------------------------------


def fail_on_call(monkeypatch, owner, name, call, error):
    """Let a function fail the n-th time it is called."""
    original, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    return calls


STEPS = [(storage, "save_tensors", 1), (storage.json, "dumps", 1)]
STEPS += [(owner, name, call) for owner, name in ((storage.os, "fsync"), (Path, "replace")) for call in (1, 2)]
STEPS += [(Path, "unlink", call) for call in (1, 2, 3)]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt("disk full")], ids=["OSError", "interrupt"])
@pytest.mark.parametrize(("owner", "name", "call"), STEPS, ids=[f"{step[1]} {step[2]}" for step in STEPS])
def test_a_crash_while_saving_leaves_a_folder_that_loads(owner, name, call, error, tmp_path, monkeypatch):
    networks = three()
    old = mola.fit(networks, LOADER, prior_precision=0.5)
    new = mola.fit(networks, LOADER[:1], structure="diag", prior_precision=7.0)
    old.save(tmp_path)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        calls = fail_on_call(patch, owner, name, call, error)
        with pytest.raises(type(error), match="disk full"):
            new.save(tmp_path)
        assert len(calls) >= call
    if name == "unlink":  # the new document may be in place already: either is whole
        loaded = mola.load(tmp_path, networks)
        assert_same(loaded, old if loaded.structure == "kron" else new)
    else:
        assert_same(mola.load(tmp_path, networks), old)
        assert {key: value for key, value in contents(tmp_path).items() if key in before} == before
        assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    new.save(tmp_path)
    assert_same(mola.load(tmp_path, networks), new)
    visible = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(visible) == 2, "a crashed save leaves nothing behind for good"


def test_a_first_save_that_crashes_leaves_no_posterior(tmp_path, monkeypatch):
    network = plain()
    posterior = mola.fit(network, LOADER)
    with monkeypatch.context() as patch:
        fail_on_call(patch, Path, "replace", 2, OSError("disk full"))
        with pytest.raises(OSError, match="disk full"):
            posterior.save(tmp_path / "new")
    with pytest.raises(StorageError, match=r"holds no saved posterior.*posterior\.json"):
        mola.load(tmp_path / "new", network)


def test_a_folder_is_never_without_a_whole_posterior_while_another_is_saved(tmp_path, monkeypatch):
    """Load at every step of a save: the old one or the new one, nothing else."""
    networks = same_kind()
    old, new = mola.fit(networks, LOADER), mola.fit(networks, LOADER[:1], structure="full")
    old.save(tmp_path)
    seen = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            seen.append(mola.load(tmp_path, networks).structure)
            result = original(*args, **kwargs)
            seen.append(mola.load(tmp_path, networks).structure)
            return result

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((storage.os, "fsync"), (Path, "replace"), (Path, "unlink")):
        watch(owner, name)
    new.save(tmp_path)
    assert len(seen) >= 10
    assert seen == ["kron"] * seen.count("kron") + ["full"] * seen.count("full")
    assert {"kron", "full"} == set(seen)


def test_a_reader_that_is_overtaken_by_a_writer_gets_the_new_one(tmp_path, monkeypatch):
    networks = same_kind()
    old, new = mola.fit(networks, LOADER), mola.fit(networks, LOADER[:1])
    old.save(tmp_path)
    read_tensors = storage._read_tensors

    def overtaken(*args):
        monkeypatch.setattr(storage, "_read_tensors", read_tensors)
        new.save(tmp_path)
        return read_tensors(*args)

    monkeypatch.setattr(storage, "_read_tensors", overtaken)
    assert_same(mola.load(tmp_path, networks), new)


def test_two_writers_at_once_leave_a_folder_that_loads(tmp_path, monkeypatch):
    """As the processes of one distributed run do, whose sums differ in the last bit."""
    networks = same_kind()
    first, second = mola.fit(networks, LOADER), mola.fit(networks, LOADER[:1])
    write = storage.write_atomically
    interrupted = []

    def overtaken(path, content):
        if path.suffix == ".json" and not interrupted:  # the first has written its tensors, but not its document
            interrupted.append(path)
            second.save(tmp_path)
        write(path, content)

    monkeypatch.setattr(storage, "write_atomically", overtaken)
    first.save(tmp_path)
    assert interrupted
    loaded = mola.load(tmp_path, networks)
    assert_same(loaded, first if loaded.components[0].curvature.factors.count == 23 else second)


def test_saving_over_an_older_one_leaves_what_is_not_ours_alone(tmp_path):
    networks = three()
    mola.fit(networks, LOADER, structure="full").save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights.safetensors").write_text("mine too")
    posterior = mola.fit(networks[0], LOADER, structure="diag")
    posterior.save(tmp_path)
    assert_same(mola.load(tmp_path, networks[0]), posterior)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "weights.safetensors").read_text() == "mine too"
    assert len(list(tmp_path.iterdir())) == 4


def test_what_cannot_be_saved_leaves_the_old_one(tmp_path):
    class MyLink(mola.Link):
        name = "mine"

        def __call__(self, moments, seed=None):
            return moments.mean.softmax(1)

    class MyKron(mola.Kron):
        pass

    network = plain()
    old = mola.fit(network, LOADER)
    before = contents(old.save(tmp_path))
    for posterior, words in (
        (old.with_link(MyLink()), r"link of your own \(MyLink\) cannot be saved"),
        (mola.fit(network, LOADER, structure=MyKron()), r"structure of your own \(MyKron\) cannot be saved"),
    ):
        with pytest.raises(StorageError, match=words):
            posterior.save(tmp_path)
        assert contents(tmp_path) == before
    with pytest.raises(StorageError, match=r"is a file; expected a folder"):
        old.save(tmp_path / "posterior.json")
    assert contents(tmp_path) == before


# --- damage -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    networks = three()
    folder = mola.fit(networks, LOADER, weights=[0.1, 0.2, 0.7], link=mola.MonteCarlo(samples=3)).save(tmp_path / "p")
    return folder, networks


def refuse(folder, networks, words):
    with unchanged(*networks), pytest.raises(StorageError, match=f"(?s){words}"):
        mola.load(folder, networks)


def tensor_file(folder):
    return next(folder.glob("*.safetensors"))


def test_a_document_cut_anywhere_is_refused(saved):
    folder, networks = saved
    path = folder / "posterior.json"
    content = path.read_bytes()
    for length in (*range(0, len(content) - 1, 37), len(content) - 1):
        path.write_bytes(content[:length])
        refuse(folder, networks, r"posterior\.json is not readable JSON.*truncated")
    path.write_bytes(content)
    mola.load(folder, networks)


def test_a_tensor_file_cut_or_changed_anywhere_is_refused(saved):
    folder, networks = saved
    path = tensor_file(folder)
    content = path.read_bytes()
    damaged = [content[:length] for length in (0, 1, 7, 8, 9, len(content) // 2, len(content) - 1)]
    damaged += [content + b"\0", b"\0" + content, content[::-1], bytes(len(content)), b"PK\3\4" + content[4:]]
    for position in range(0, len(content), 97):
        damaged.append(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    for one in damaged:
        path.write_bytes(one)
        refuse(folder, networks, r"\.safetensors is truncated or corrupt.*checksum.*(Copy|save)")
    path.write_bytes(content)
    mola.load(folder, networks)


def edit(folder, change):
    """A document without a seal, as older versions wrote it, so that what is inside is looked at."""
    path = folder / "posterior.json"
    document = json.loads(path.read_text())
    document.pop("sha256", None)
    path.write_text(json.dumps(change(document) or document))


def replace_tensors(folder, change):
    """Other tensors, with a checksum that is right."""
    path = tensor_file(folder)
    tensors = load(path.read_bytes())
    change(tensors)
    path.write_bytes(save(tensors))
    edit(folder, lambda document: document["tensors"].update(sha256=hashlib.sha256(path.read_bytes()).hexdigest()))


def document(**entries):
    return lambda folder: edit(folder, lambda document: document.update(entries))


def without(name):
    return lambda folder: edit(folder, lambda document: document.pop(name) and None)


def inside(*path, **entries):
    return lambda folder: edit(folder, lambda document: at(document, path).update(entries))


def gram(change):
    return lambda folder: replace_tensors(folder, lambda tensors: tensors.update({"1.gram": change(tensors["1.gram"])}))


def remove_all(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def write(content):
    return lambda folder: (folder / "posterior.json").write_bytes(content)


def not_tensors(folder):
    content = b"12345678" * 9
    tensor_file(folder).write_bytes(content)
    inside("tensors", sha256=hashlib.sha256(content).hexdigest())(folder)


FOREIGN = {
    "no folder": (remove_all, r"holds no saved posterior"),
    "no document": (lambda folder: (folder / "posterior.json").unlink(), r"posterior\.json is missing.*save"),
    "no tensors": (lambda folder: tensor_file(folder).unlink(), r"missing: posterior\.json points to it.*whole folder"),
    "a list": (lambda folder: edit(folder, lambda _: [1]), r"not written by mola"),
    "another format": (document(format="peft"), r"not written by mola.*mola-posterior"),
    "no format": (without("format"), r"not written by mola"),
    "binary": (write(b"\x80\x04\x95\xff"), r"not readable JSON"),
    "deeply nested": (write(b"[" * 200000), r"not readable JSON"),
    "newer": (document(version=3), r"version 3; this mola reads versions 1 and 2.*Update mola"),
    "older": (document(version=0), r"version 0; this mola reads versions 1 and 2"),
    "version as a word": (document(version="1"), r"version '1'"),
    "no version": (without("version"), r"version None"),
    "unknown structure": (inside("structure", name="ekfac"), r"unknown structure 'ekfac'.*'kron'"),
    "unknown link": (inside("link", name="sigmoid"), r"unknown link 'sigmoid'.*'probit'"),
    "unknown likelihood": (document(likelihood="poisson"), r"likelihood 'poisson'.*categorical"),
    "unknown setting": (inside("link", colour=1), r"colour"),
    "more components": (
        lambda folder: edit(folder, lambda document: document["components"].append(document["components"][0])),
        r"4 components, got 3 models",
    ),
    "fewer components": (
        lambda folder: edit(folder, lambda document: document["components"].pop() and None),
        r"2 components, got 3 models",
    ),
    "another number of classes": (document(classes=4), r"models\[0\].*\(3, 5, True\).*\(4, 5, True\)"),
    "another width": (inside("components", 1, features=9), r"models\[1\].*\(3, 6, False\).*\(3, 9, False\)"),
    "weights that do not sum to 1": (document(weights=[1, 1, 1]), r"weights.*sum"),
    "precision 0": (inside("components", 0, prior_precision=0), r"prior_precision"),
    "precision NaN": (inside("components", 0, prior_precision=float("nan")), r"prior_precision"),
    "a tensor missing": (lambda folder: replace_tensors(folder, lambda tensors: tensors.pop("1.gram")), r"1\.gram"),
    "a tensor of another shape": (gram(lambda _: torch.eye(4)), r"1\.gram has shape \(4, 4\), expected \(6, 6\)"),
    "a tensor of lower precision": (gram(lambda tensor: tensor.float()), r"1\.gram.*float32"),
    "a tensor of integers": (gram(lambda tensor: tensor.long()), r"1\.gram.*int64"),
    "a tensor with NaN": (gram(lambda tensor: tensor * float("nan")), r"1\.gram.*(NaN|finite)"),
    "no safetensors": (not_tensors, r"not a safetensors file"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_newer_and_edited_files_are_refused(name, saved):
    folder, networks = saved
    FOREIGN[name][0](folder)
    refuse(folder, networks, FOREIGN[name][1])


def places(value, path=()):
    """Every path into a document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def at(document, path):
    for key in path:
        document = document[key]
    return document


JUNK = {
    "null": None,
    "word": "junk",
    "list": [],
    "object": {},
    "minus one": -1,
    "truth": True,
    "infinity": float("inf"),
}
HARMLESS = {
    ("tuning", "null"),
    ("log_likelihood", "null"),
    ("log_likelihood", "minus one"),
    ("rule", "word"),
    ("seed", "minus one"),
    ("notes", "list"),
    ("curve", "object"),
    ("usual", "null"),
}


def test_a_document_without_any_one_of_its_entries_is_refused(saved):
    folder, networks = saved
    edit(folder, lambda document: None)
    content = (folder / "posterior.json").read_text()
    for path in places(json.loads(content)):
        if isinstance(path[-1], int) or path[0] in ("weights", "link"):  # a link's settings have defaults
            continue
        document = json.loads(content)
        del at(document, path[:-1])[path[-1]]
        if path[-1] in ("float16", "bfloat16", "float32"):
            continue  # fingerprints in other precisions than the networks'
        if path[-1] in ("order", "cooling"):
            continue  # files of older versions lack it
        (folder / "posterior.json").write_text(json.dumps(document))
        try:
            refuse(folder, networks, ".")
        except BaseException as error:
            raise AssertionError(f"without {path}: {error!r}") from error


@pytest.mark.parametrize("junk", JUNK)
def test_a_document_with_junk_in_any_one_of_its_entries_is_refused(junk, saved):
    folder, networks = saved
    edit(folder, lambda document: None)
    content = (folder / "posterior.json").read_text()
    wrong = []
    for path in places(json.loads(content)):
        if (path[-1], junk) in HARMLESS or path[-1] in ("float16", "bfloat16", "float32"):
            continue
        document = json.loads(content)
        if junk == "truth" and isinstance(at(document, path), (int, float)):
            continue  # Python calls it a number
        at(document, path[:-1])[path[-1]] = JUNK[junk]
        (folder / "posterior.json").write_text(json.dumps(document))
        try:
            mola.load(folder, networks)
        except StorageError:
            continue
        except Exception as error:
            wrong.append(f"{path}: {error!r}")
        else:
            wrong.append(f"{path}: loaded")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "name", ["../stolen", "/{outside}/stolen", "sub/../../stolen", "..\\stolen", "../p2/../stolen"]
)
def test_a_document_cannot_point_outside_its_folder(name, saved):
    folder, networks = saved
    outside = folder.parent
    path = tensor_file(folder)
    (outside / "stolen").write_bytes(path.read_bytes())  # whole, and with the right checksum
    path.unlink()
    edit(folder, lambda document: document["tensors"].update(file=name.format(outside=str(outside).strip("/"))))
    refuse(folder, networks, r"missing|outside")


def test_a_document_cannot_make_code_run(saved):
    folder, networks = saved
    edit(folder, lambda document: document["structure"].update(name="__import__"))
    refuse(folder, networks, r"unknown structure")


# --- the wrong network --------------------------------------------------------------------------------------------------


def test_networks_in_the_wrong_order_are_told_apart(tmp_path):
    networks = same_kind()
    mola.fit(networks, LOADER).save(tmp_path)
    first, second, third = networks
    words = r"models\[0\].*not those.*They are those of models\[1\].*same 3 networks, in the order"
    refuse(tmp_path, [second, first, third], words)
    refuse(tmp_path, [first, third, second], r"models\[1\].*They are those of models\[2\]")
    refuse(tmp_path, [third, first, second], r"models\[0\].*They are those of models\[1\]")
    refuse(tmp_path, [first, second, second], r"models\[2\]: the weights of head '2' are not those")


def test_networks_of_different_kinds_in_the_wrong_order_are_told_apart(tmp_path):
    """Wherever the heads differ: in width, in name, in having a bias."""
    networks = three()
    mola.fit(networks, LOADER).save(tmp_path)
    first, second, third = networks
    refuse(tmp_path, [third, second, first], r"models\[0\].*those of models\[2\].*in the order")
    refuse(tmp_path, [second, first, third], r"models\[0\].*those of models\[1\].*in the order")


def retrained(network):
    network[2].weight.data[1, 2] += 1e-15
    return network


def with_another_bias(network):
    network[2].bias.data[0] = -network[2].bias.data[0]
    return network


def with_another_head(network):
    network[2] = nn.Linear(4, 5).double()
    return network


OTHERS = {
    "another seed": (lambda _: plain(seed=9), r"weights of head '2' are not those"),
    "one weight by one part in 1e15": (retrained, r"weights of head '2' are not those"),
    "one bias": (with_another_bias, r"weights of head '2' are not those"),
    "another number of classes": (with_another_head, r"\(5, 5, True\).*\(3, 5, True\)"),
    "another width": (lambda _: plain(width=5), r"\(3, 6, True\).*\(3, 5, True\)"),
    "another name": (lambda _: Named(4), r"not the network that was fitted.*no module of that name.*'classifier'"),
    "not a linear layer": (lambda n: n.insert(2, nn.Tanh()), r"not the network that was fitted.*Tanh"),
    "a bare layer": (lambda n: n[2], r"not the network that was fitted.*no module of that name"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_posterior_does_not_go_on_another_network(name, tmp_path):
    change, words = OTHERS[name]
    network = plain()
    mola.fit(network, LOADER).save(tmp_path)
    refuse(tmp_path, [change(copy.deepcopy(network))], rf"models\[0\].*{words}")
    mola.load(tmp_path, copy.deepcopy(network))  # the same weights in another object are the same network


NOT_MODELS = [[], None, "model.pt", [None]]


@pytest.mark.parametrize("models", NOT_MODELS, ids=repr)
def test_loading_needs_networks(models, tmp_path):
    mola.fit(plain(), LOADER).save(tmp_path)
    with pytest.raises(mola.OptionError, match=r"models: expected one nn\.Module"):
        mola.load(tmp_path, models)


# --- the same network in another precision ------------------------------------------------------------------------------


def single(seed=0):
    return plain(seed=seed).float()


FLOATS = [(x.float(), y) for x, y in LOADER]


@pytest.mark.parametrize("weights", ["uniform", "evidence"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_posterior_fitted_in_float32_goes_on_the_network_in_any_precision(dtype, weights, tmp_path):
    networks = [single(0), single(1)]
    posterior = mola.fit(networks, FLOATS, weights=weights)
    expected = posterior.predict(FAR.float()).probs
    posterior.save(tmp_path)
    moved = [copy.deepcopy(network).to(dtype) for network in networks]
    with unchanged(*moved):
        loaded = mola.load(tmp_path, moved)
    probs = loaded.predict(FAR.to(dtype)).probs
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(probs.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(loaded.weights, posterior.weights)
    for one, two in zip(loaded.components, posterior.components, strict=True):
        assert torch.equal(one.curvature.factors.gram, two.curvature.factors.gram)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_posterior_fitted_in_half_precision_goes_on_the_network_in_float32(dtype, tmp_path):
    network = single().to(dtype)
    mola.fit(network, [(x.to(dtype), y) for x, y in LOADER]).save(tmp_path)
    mola.load(tmp_path, copy.deepcopy(network).float())
    mola.load(tmp_path, copy.deepcopy(network).double())
    with pytest.raises(StorageError, match="are not those"):  # the full-precision original has other weights
        mola.load(tmp_path, single())


def test_a_network_that_was_rounded_is_not_the_same_network(tmp_path):
    network = single()
    mola.fit(network, FLOATS).save(tmp_path)
    refuse(tmp_path, [copy.deepcopy(network).half().float()], r"are not those")
    refuse(tmp_path, [single(1).half()], r"are not those")


def test_a_posterior_does_not_go_on_a_network_whose_body_has_changed(tmp_path):
    network = plain()
    posterior = mola.fit(network, LOADER)
    posterior.save(tmp_path)
    changed = copy.deepcopy(network)
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1e-3
    with pytest.raises(StorageError, match=r"models\[0\].*other layers have changed"):
        mola.load(tmp_path, changed)
    assert_same(mola.load(tmp_path, network), posterior)
