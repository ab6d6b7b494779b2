"""A file that differs in any byte is refused or gives the same numbers; what was killed leaves one whole thing or another."""

import copy
import json
import os
import random
import shutil
import signal
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import mola
from mola import MolaError, StorageError
from mola.app.jobs.fit import run_fit
from mola.app.jobs.folder import open_posterior, read_folder, read_information
from mola.app.jobs.job import read_job, to_toml
from mola.compare.record import LabelledResult, OutlierResult, Record
from mola.compare.store import Store
from mola.export.information import from_properties
from mola.laplace import base
from mola.saving import storage
from mola.saving.training_checkpoint import TrainingCheckpoint
from mola.schema import sealed
from tests.forked_python import run_python
from tests.own_work import as_of_old, fit_at, job_for, make_desk

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3
LOADER = [(X, Y)]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(3, 3)).double()


# --- every kind of file: how it is made, and what it says ---------------------------------------------------------------


def make_posterior(folder):
    mola.fit([network(0), network(1)], LOADER, prior_precision=0.3).save(folder)


def ask_posterior(folder):
    return mola.load(folder, [network(0), network(1)])(X)


def make_whole(folder):
    mola.fit_whole(network(), LOADER, structure="diag").save(folder)


def make_temperature(folder):
    mola.TemperatureScaled([network(0), network(1)], [1.5, 2.5]).save(folder)


def make_dropout(folder):
    mola.McDropout(network(), samples=4, seed=3).save(folder)


def make_swag(folder):
    mola.Swag.fit(network(), LOADER, epochs=2, learning_rate=0.01, rank=2, samples=2, progress=False).save(folder)


NUMBERS = mola.Gaussian(noise=[0.5, 1.0, 2.0], location=3.0, scale=2.0)


def make_dropout_of_numbers(folder):
    mola.McDropout(network(), samples=4, seed=3, likelihood=NUMBERS).save(folder)


def make_swag_of_numbers(folder):
    loader = [(X, 3 + 2 * X[:, :3])]
    options = {"epochs": 2, "learning_rate": 0.001, "rank": 2, "samples": 2, "likelihood": NUMBERS}
    mola.Swag.fit(network(), loader, progress=False, **options).save(folder)


def said_of_numbers(predictor):
    said = predictor.predict(X)
    return torch.stack([said.mean, said.variance])


def make_mimo(folder):
    torch.manual_seed(0)
    mola.Mimo(network(), members=2, example=X).save(folder)


def make_fit_checkpoint(folder):
    class Interrupted(Exception):  # noqa: N818
        pass

    def batches():
        yield from LOADER * 2
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "GATHERED", (12, 12, 2**19))  # rows that are gathered before they are summed
        with pytest.raises(Interrupted):
            mola.fit(network(), batches(), checkpoint=folder / "fit", checkpoint_every=1)


def ask_fit_checkpoint(folder):
    kept = shutil.copytree(folder / "fit", folder.parent / "again")  # it is removed when the fit is done
    try:
        return mola.fit(network(), LOADER * 3, checkpoint=kept, checkpoint_every=100)(X)
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def make_checkpoint(folder):
    torch.manual_seed(0)
    trained, optimiser, schedule = training()
    TrainingCheckpoint(folder / "c", "training-checkpoint", {"seed": 1}).save(3, trained, optimiser, schedule)


def training():
    trained = network()
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    nn.functional.cross_entropy(trained.eval()(X), Y).backward()
    optimiser.step()
    return trained, optimiser, torch.optim.lr_scheduler.StepLR(optimiser, 5)


def ask_checkpoint(folder):
    trained, optimiser, schedule = training()
    with torch.no_grad():
        trained[0].weight.zero_()
    checkpoint = TrainingCheckpoint(folder / "c", "training-checkpoint", {"seed": 1})
    epoch, _ = checkpoint.restore(3, trained, optimiser, schedule)
    momentum = [state["momentum_buffer"].flatten() for state in optimiser.state.values()]
    rates = torch.tensor([epoch, schedule.last_epoch, optimiser.param_groups[0]["lr"]], dtype=torch.float64)
    return torch.cat([trained(X).detach().flatten(), *momentum, rates])


RECORD = Record(
    suite="s",
    method="MoLA",
    group="main",
    run=0,
    settings={"structure": "kron"},
    networks=["ab"],
    data={"test": "cd"},
    chosen={"prior_precision": [0.5]},
    seconds={"fit": 1.5},
    labelled={"test": LabelledResult(0.0, 10, {"accuracy": 0.9}, [[1.0, 2.0, 3.0]], [1, 2])},
    outliers={"noise": OutlierResult(5, 0.4, {"far-field": {"auroc": 0.8}}, [3, 4])},
)


def ask_record(folder):
    found = Store(folder).read("s", "MoLA", 0)
    return dict(vars(found))


KINDS = {
    "posterior": (make_posterior, ask_posterior),
    "whole": (make_whole, lambda folder: mola.WholeMoLA.load(folder, network())(X)),
    "temperature": (make_temperature, lambda folder: mola.TemperatureScaled.load(folder, [network(0), network(1)])(X)),
    "dropout": (make_dropout, lambda folder: mola.McDropout.load(folder, network())(X)),
    "swag": (make_swag, lambda folder: mola.Swag.load(folder, network(5))(X)),
    "dropout of numbers": (
        make_dropout_of_numbers,
        lambda folder: said_of_numbers(mola.McDropout.load(folder, network())),
    ),
    "swag of numbers": (make_swag_of_numbers, lambda folder: said_of_numbers(mola.Swag.load(folder, network(5)))),
    "mimo": (make_mimo, lambda folder: mola.Mimo.load(folder, network(5), example=X)(X)),
    "fit checkpoint": (make_fit_checkpoint, ask_fit_checkpoint),
    "training checkpoint": (make_checkpoint, ask_checkpoint),
    "record": (lambda folder: Store(folder).write(RECORD), ask_record),
}


def same(first, second):
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def flips(content, rng, count):
    """Files that differ in one byte: every place of a small file, some of a larger one."""
    places = range(len(content)) if len(content) <= count else sorted(rng.sample(range(len(content)), count))
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << rng.randrange(8)
        yield place, bytes(changed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_differs_in_a_byte_is_refused_or_gives_the_same_numbers(kind, tmp_path):
    times = 80
    make, ask = KINDS[kind]
    tmp_path.joinpath("f").mkdir()
    make(tmp_path / "f")
    expected, wrong, tried, refused, rng = ask(tmp_path / "f"), [], 0, 0, random.Random(7)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for place, changed in flips(content, rng, times):
            path.write_bytes(changed)
            tried += 1
            try:
                if not same(ask(tmp_path / "f"), expected):
                    wrong.append(f"{path.name} at {place}: other numbers")
            except MolaError:
                refused += 1
            except Exception as error:
                wrong.append(f"{path.name} at {place}: {error!r}")
        path.write_bytes(content)
    assert not wrong, "\n".join(wrong)
    assert refused > 0.8 * tried >= 0.8 * times, "a flipped bit is nearly always noticed"


# --- documents that nobody would write ----------------------------------------------------------------------------------

MONSTERS = {
    "2**70": 2**70,
    "-2**70": -(2**70),
    "10**400": 10**400,
    "1e400": float("inf"),
    "null": None,
    "text": "junk",
    "list": [],
    "object": {},
    "nested": json.loads("[" * 300 + "]" * 300),
    "truth": True,
    "tiny": 1e-320,
}


def spots(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from spots(inner, (*path, key))


def mutated(document, rng):
    """A document with one entry replaced, removed or repeated."""
    document = copy.deepcopy(document)
    *way, last = rng.choice(list(spots(document)))
    holder = document
    for key in way:
        holder = holder[key]
    how = rng.randrange(4)
    if how == 0:
        del holder[last]
    elif how == 1 and isinstance(holder, list):
        holder.append(holder[last])
    else:
        holder[last] = rng.choice(list(MONSTERS.values()))
    return document


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "training checkpoint"])
@pytest.mark.parametrize("resealed", [True, False])
def test_documents_that_nobody_would_write_are_refused_in_words(kind, resealed, tmp_path):
    """With a seal that is right, and with none, as older versions wrote them: the checks behind it hold alone."""
    make, ask = KINDS[kind]
    made = tmp_path / "f"
    made.mkdir()
    make(made)
    (path,) = made.rglob("*.json")
    document, rng, wrong = json.loads(path.read_text()), random.Random(11), []
    del document["sha256"]
    for _ in range(60):
        changed = mutated(document, rng)
        path.write_text(json.dumps(sealed(changed) if resealed and shallow(changed) else changed))
        try:
            ask(made)
        except MolaError:
            continue
        except Exception as error:
            wrong.append(f"{difference(document, changed)}: {error!r}")
    assert not wrong, "\n".join(wrong)


def shallow(value):
    return "[" * 60 not in json.dumps(value)


def difference(before, after):
    return next((f"{key}: {str(after.get(key))[:200]}" for key in before if after.get(key) != before[key]), "nothing")


BROKEN = {
    "deep": b'{"a":' * 100_000,
    "5000 digits": b'{"format": "mola-posterior", "version": ' + b"9" * 5000 + b"}",
    "deep list": b"[" * 100_000 + b"]" * 100_000,
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_text_is_refused_in_words(name, tmp_path):
    (tmp_path / "posterior.json").write_bytes(BROKEN[name])
    (tmp_path / "config.json").write_bytes(BROKEN[name])
    (tmp_path / "s" / "mola").mkdir(parents=True)
    (tmp_path / "s" / "mola" / "run-0.json").write_bytes(BROKEN[name])
    with pytest.raises(StorageError):
        mola.load(tmp_path, network())
    with pytest.raises(StorageError):
        mola.load_from_hub_folder(tmp_path)
    with pytest.raises(StorageError):
        Store(tmp_path).read("s", "MoLA", 0)
    with pytest.raises(StorageError):
        from_properties({"mola.format_version": BROKEN[name].decode(errors="replace")}, "a.onnx")


TOML = {
    "deep": "a = " + "[" * 5000 + "]" * 5000,
    "deep enough for Python": "a = " + "[" * 200 + "]" * 200,
    "5000 digits": "[run]\nseed = " + "9" * 5000,
    "a seed of 2**70": f"[run]\nseed = {2**70}",
    "a number without a float": "[method]\nprior_precision = 1" + "0" * 400,
    "numbers without a float": f"[preparation]\nmean = [{10**400}]",
    "a huge side": f"[preparation]\nresize = {2**70}",
}


@pytest.mark.parametrize("name", TOML)
def test_a_run_file_that_nobody_would_write_is_refused_in_words(name, tmp_path):
    (tmp_path / "job.toml").write_text(TOML[name])
    with pytest.raises(mola.OptionError, match=r"job\.toml"):
        read_job(tmp_path / "job.toml")


# --- a posterior and its job ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return make_desk(tmp_path_factory.mktemp("desk"), "own_networks_for_damage")


@pytest.fixture(scope="module")
def fitted(desk):
    return fit_at(desk, desk.root / "posterior")


@pytest.fixture
def folder(desk, fitted, monkeypatch):
    """A copy beside the original, so that paths hold."""
    monkeypatch.chdir(desk.root)
    monkeypatch.syspath_prepend(str(desk.root))
    made = desk.root / "copy"
    shutil.copytree(fitted.folder, made)
    yield made
    shutil.rmtree(made)


def edited(folder, change):
    document = tomllib.loads((folder / "job.toml").read_text())
    change(document)
    (folder / "job.toml").write_text(to_toml(document))


def test_a_posterior_keeps_its_preparation_whatever_its_job_file_says(folder, fitted):
    """As when `mola fit` is killed between the two files: the old one's preparation gave wrong answers in silence."""
    before = read_folder(folder)
    edited(folder, lambda document: document["result"]["intake"].update(mean=[9.0], std=[0.1]))
    with pytest.warns(mola.MolaWarning, match=r"result\.intake differs.*what was fitted is used.*mola fit --config"):
        opened = open_posterior(folder)
    assert opened.preparation == before[1]["result"]["intake"] == fitted.preparation
    (folder / "job.toml").unlink()
    assert read_folder(folder) == before, "the posterior's own document has the job, too"
    assert read_information(folder)["intake"] == fitted.preparation


def test_an_edited_job_file_is_still_a_run_file(folder):
    edited(folder, lambda document: document["method"].update(structure="diag"))
    assert read_job(folder / "job.toml")[0].structure == "diag"
    with pytest.warns(mola.MolaWarning, match=r"method\.structure differs"):
        assert open_posterior(folder).posterior.structure == "kron"


def test_files_that_moved_may_be_named_in_the_job_file(folder, desk, tmp_path):
    moved = [shutil.copy(path, tmp_path / f"moved-{index}.safetensors") for index, path in enumerate(desk.weights())]
    edited(folder, lambda document: document["networks"].update(weights=[str(path) for path in moved]))
    with warnings.catch_warnings(action="error"):
        opened = open_posterior(folder)
    assert list(opened.job.weights) == [str(path) for path in moved]
    Path(moved[0]).write_bytes(Path(moved[1]).read_bytes())
    with pytest.raises(StorageError, match="has changed since"):
        open_posterior(folder)


def test_a_posterior_saved_over_another_does_not_take_its_job(folder, fitted):
    fitted.posterior.with_prior_precision(3.0).save(folder)
    with pytest.raises(StorageError, match=r"job\.toml is of another posterior.*saved from Python"):
        open_posterior(folder)


def test_a_folder_of_an_older_version_still_opens(folder, fitted):
    as_of_old(folder)
    document = json.loads((folder / "posterior.json").read_text())
    for part, one in zip(document["components"], fitted.posterior.networks, strict=True):
        numbers = torch.cat([parameter.detach().double().flatten() for parameter in one.parameters()])
        sums = {"sum": float(numbers.sum()), "magnitude": float(numbers.abs().sum())}
        part["network"] = {"numbers": len(numbers), **sums, "half": False}
    (folder / "posterior.json").write_text(json.dumps(document))
    opened = open_posterior(folder)
    assert torch.equal(opened.posterior(opened.example), fitted.posterior(fitted.example))


def test_absurd_inputs_in_a_job_are_refused(folder):
    as_of_old(folder)
    edited(folder, lambda document: document["result"]["inputs"][0].update(shape=[2**40, 2**40]))
    with pytest.raises(StorageError, match=r"invalid: inputs of shape"):
        open_posterior(folder)


STEPS = [("replace", call) for call in (1, 2, 3)] + [("unlink", call) for call in range(1, 5)]
"""What `mola fit` does to files, step by step."""


@pytest.mark.parametrize(("name", "call"), STEPS)
def test_a_fit_that_is_killed_leaves_the_old_posterior_or_the_new_one(name, call, desk, tmp_path, monkeypatch):
    """At every step of writing, the folder opens with a posterior and the preparation that belongs to it."""
    monkeypatch.chdir(desk.root)
    monkeypatch.syspath_prepend(str(desk.root))
    folder = tmp_path / "posterior"
    run_fit(job_for(desk, mean=(0.0,), std=(1.0,), val="val.npz", rule="none"), folder, bundle=True)
    old = open_posterior(folder)
    original, calls = getattr(Path, name), []

    def killed(self, *args, **kwargs):
        if folder in self.parents:
            calls.append(self)
            if len(calls) == call:
                raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    weights = tuple(desk.weights()[::-1])
    new = job_for(desk, mean=(0.5,), std=(2.0,), structure="diag", weights=weights, val="val.npz", rule="none")
    with monkeypatch.context() as patch:
        patch.setattr(Path, name, killed)
        with pytest.raises(KeyboardInterrupt):
            run_fit(new, folder, bundle=True)
    with warnings.catch_warnings(action="ignore"):  # job.toml, for people, may be the old one's
        opened = open_posterior(folder)
    pair = (opened.posterior.structure, opened.preparation["mean"])
    assert pair in (("kron", old.preparation["mean"]), ("diag", [0.5]))


# --- partial files -------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from mola.saving import storage
original = Path.replace
Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
storage.write_atomically(Path(sys.argv[1]), b"new")
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL and locks")
def test_partial_files_of_killed_writers_are_removed_and_those_of_others_are_not(tmp_path):
    path = tmp_path / "file [1].json"
    storage.write_atomically(path, b"old")
    assert run_python("-c", KILLED, path).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".*.partial"))) == 1, "the killed writer left one"
    assert path.read_bytes() == b"old"
    with storage.partial_file(tmp_path / "other.json") as other, storage.partial_file(path) as alive:
        assert {one.name for one in tmp_path.glob(".*.partial")} == {other.name, alive.name}
        storage.write_atomically(path, b"new")
        assert alive.exists(), "somebody is writing it"
        assert other.exists()
    assert sorted(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL and locks")
def test_saving_removes_what_killed_saves_left(tmp_path):
    make_posterior(tmp_path)
    (tmp_path / ".factors-0123456789abcdef.safetensors.0a1b.partial").write_bytes(b"half")
    (tmp_path / ".posterior.json.0a1b.partial").write_bytes(b"{")
    make_posterior(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
