"""`mola explore` on what `mola fit` writes, and on the digits demo: what it takes, what it refuses, and how it ends."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import mola
from mola.__main__ import main
from mola.app.explore.changes import NEUTRAL
from mola.app.explore.opinions import METHODS, Explorer
from mola.app.explore.server import listen
from mola.app.explore.subject import EXAMPLES, digits_subject, open_subject, thinned
from mola.app.jobs.fit import run_fit
from mola.app.jobs.job import Job, to_toml
from mola.app.jobs.preparation import Intake
from mola.app.jobs.sets import open_set
from mola.compare.demo_result import DemoSettings
from mola.errors import MolaError, OptionError, StorageError
from mola.saving.weights_files import save_weights
from tests.closeness import assert_close
from tests.conftest import require_shared
from tests.forked_python import run_python
from tests.own_work import CLASSES, as_of_old, fit_at, job_for, make_desk

PATIENCE = 120
"""Seconds that a server may take to start on a machine that is busy with other things."""

needs_gradio = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None and not os.environ.get("CI"),
    reason="NO GRADIO: pip install 'mola-torch[explore]' to test the explorer's page.",
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return make_desk(tmp_path_factory.mktemp("desk"), "own_networks_to_explore")


@pytest.fixture(autouse=True)
def _at_the_desk(desk, monkeypatch):
    monkeypatch.chdir(desk.root)
    monkeypatch.syspath_prepend(str(desk.root))


@pytest.fixture(scope="module")
def folder(desk, tmp_path_factory):
    return fit_at(desk, tmp_path_factory.mktemp("fitted") / "posterior").folder


def without(folder, to, *, quantiles=True, **changes):
    """A copy of a posterior's folder with another `job.toml`."""
    as_of_old(shutil.copytree(folder, to))
    document = tomllib.loads((to / "job.toml").read_text())
    if quantiles:
        del document["result"]["validation"]["outlier_quantiles"]
    for path, value in changes.items():
        section, name = path.split("__")
        document[section][name] = value
    (to / "job.toml").write_text(to_toml(document))
    return to


def test_fitting_keeps_how_outlier_scores_are_distributed(folder, desk):
    validation = tomllib.loads((folder / "job.toml").read_text())["result"]["validation"]
    levels, scores = zip(*validation["outlier_quantiles"], strict=True)
    posterior = mola.load(folder, models=desk.networks())
    inputs, _ = desk.inputs("val")
    measured = posterior.predict(inputs).ood_score.double().numpy()
    assert_close(np.quantile(measured, levels), scores, "difference")
    threshold = mola.alarm_threshold(measured, validation["false_alarm_rate"])
    assert_close(validation["outlier_threshold"], threshold, "difference", scale=max(scores))


def test_a_folder_is_opened_with_all_that_the_page_needs(folder, desk):
    told = []
    subject = open_subject(folder, lambda doing, done: told.append((doing, done)))
    assert subject.classes == CLASSES
    assert subject.sight.shape == (3, 6, 6)
    assert subject.notes == ()
    assert subject.reference.count == 18
    assert told[-1] == ("done", 1.0)
    val, _ = desk.pixels("val")
    own = [one for one in subject.examples if one.name == "from val"]
    assert len(own) == EXAMPLES
    assert all(any(torch.equal(one.pixels, picture) for picture in val) for one in own)
    opinions = Explorer(subject).look(val[3], NEUTRAL)
    inputs, _ = desk.inputs("val")
    networks = desk.networks()
    for method, models in (("MAP", networks[:1]), ("DE", networks)):
        assert_close(opinions.probs[method], mola.ensemble(models)(inputs[3:4])[0])
    posterior = mola.load(folder, models=networks)
    assert_close(opinions.probs["MoLA"], posterior(inputs[3:4])[0])
    assert_close(opinions.score, posterior.predict(inputs[3:4]).ood_score[0], "difference", scale=1.0)


def test_an_older_folder_is_scored_on_its_validation_data(folder, tmp_path):
    old = open_subject(without(folder, tmp_path / "old", data__val=str(Path("val").resolve())))
    new = open_subject(folder)
    assert old.notes == ()
    assert_close(old.reference.scores, new.reference.scores, "difference")


def test_other_data_can_be_compared_with(folder):
    strange = open_subject(folder, reference="strange")
    assert strange.reference.count == 12
    assert strange.reference.name == "strange"
    assert strange.examples[0].name == "from strange"
    with pytest.raises(MolaError, match="nowhere"):
        open_subject(folder, reference="nowhere")


def test_without_its_validation_data_a_folder_still_opens_and_says_what_is_missing(folder, tmp_path):
    kept = open_subject(without(folder, tmp_path / "kept", quantiles=False, data__val="gone/away"))
    assert kept.reference.count == 18
    assert re.match(r"examples are missing, since .*gone/away cannot be read here: ", kept.notes[0])
    lost = open_subject(without(folder, tmp_path / "lost", data__val="gone/away"))
    assert lost.reference is None
    assert "outlier scores to compare with, are missing" in lost.notes[0]
    assert "--reference" in lost.notes[0]
    assert [one.name for one in lost.examples] == ["noise", "checks", "a flower"]


def test_a_folder_that_was_fitted_without_validation_data_says_so(desk, tmp_path):
    run_fit(job_for(desk, val=None, rule="evidence"), tmp_path / "plain")
    subject = open_subject(tmp_path / "plain")
    assert subject.reference is None
    assert "fitted without validation data: name some with --reference" in subject.notes[0]


def test_the_rules_of_trust_stay(folder, tmp_path):
    hostile = without(folder, tmp_path / "hostile", networks__network="pytest:main")
    with pytest.raises(OptionError, match="add --trust"):
        open_subject(hostile)
    curious = without(folder, tmp_path / "curious", data__val="pytest:main")
    assert "add --trust" in open_subject(curious).notes[0]
    garbled = without(folder, tmp_path / "garbled", quantiles=False)
    document = tomllib.loads((garbled / "job.toml").read_text())
    document["result"]["validation"]["outlier_quantiles"] = [[0.0, 1.0], [1.0, 0.0]]
    (garbled / "job.toml").write_text(to_toml(document))
    with pytest.raises(StorageError, match="invalid"):
        open_subject(garbled)
    with pytest.raises(StorageError, match=r"holds no job\.toml"):
        open_subject(tmp_path)


TABLES = """
from torch import nn
def table():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).float()
def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(75, 8), nn.ReLU(), nn.Linear(8, 3)).float()
"""


@pytest.mark.parametrize(
    ("builder", "shape", "words"),
    [
        ("table", (5,), r"for networks that see pictures.* inputs of shape \(5,\); `mola predict`"),
        ("flat", (3, 5, 5), r"range from -\d.* where pixels range from 0 to 1.*--normalise"),
    ],
)
@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_inputs_that_cannot_be_made_of_pictures_are_refused(builder, shape, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"networks_of_{builder}.py").write_text(TABLES)
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        np.savez(tmp_path / f"{split}.npz", x=draw.normal(size=(30, *shape)).astype(np.float32), y=np.arange(30) % 3)
    torch.manual_seed(0)
    network = nn.Sequential(*([nn.Flatten()] if builder == "flat" else []), nn.Linear(int(np.prod(shape)), 8))
    network = nn.Sequential(*network, nn.ReLU(), nn.Linear(8, 3)).float()
    save_weights(network, tmp_path / "0.safetensors")
    job = Job((f"networks_of_{builder}:{builder}",), ("0.safetensors",), train="train.npz", val="val.npz")
    run_fit(job, tmp_path / "posterior")
    with pytest.raises(OptionError, match=words):
        open_subject(tmp_path / "posterior")


@pytest.mark.parametrize("name", ["val", "val.npz", "val.csv", "strange"])
def test_a_set_is_thinned_evenly_where_it_can_be(name):
    source = open_set(name, Intake(mode="RGB", shape=(3, 6, 6), batch_size=4, workers=0), labelled=False)
    few = thinned(source, 3)
    assert thinned(source, 1000) is source
    names = [one for rows in source for one in rows.names]
    kept = [one for rows in few for one in rows.names]
    if name == "val.npz":
        assert kept == names  # a stream, read from its start
    else:
        assert kept == [names[place] for place in (0, (len(names) - 1) // 2, len(names) - 1)]


# --- the demo -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")  # so little training leaves little to tune
def test_the_digits_demo_is_that_of_the_demo():
    torch.set_default_dtype(torch.float32)
    settings = DemoSettings(seed=1, members=2, epochs=3)
    told = []
    subject = digits_subject(lambda doing, done: told.append(done), settings)
    assert told == sorted(told)
    from mola.lab.data.embedded import load_digits
    from mola.lab.demo import build_network
    from mola.training import Recipe, train_ensemble

    digits = load_digits(1)
    networks = train_ensemble(build_network, digits.train, Recipe(epochs=3), members=2, seed=1)
    expected = mola.fit(networks, digits.train.batches(), digits.val.batches(), rule="distance", progress=False)
    some = digits.test.inputs[:20]
    assert_close(subject.posterior(some), expected(some))
    assert subject.reference.count == len(digits.val)
    assert subject.classes == tuple("0123456789")
    assert [one.name[-1] for one in subject.examples[:10]] == list("0123456789")
    explorer = Explorer(subject)
    opinions = explorer.look(subject.examples[4].pixels, NEUTRAL)
    assert all(len(opinions.probs[method]) == 10 for method in METHODS)


# --- the command --------------------------------------------------------------------------------------------------------


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["mola", "explore", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@needs_gradio
def test_a_port_that_is_taken_is_one_line_before_any_work(monkeypatch, capsys, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(monkeypatch, str(folder), "--port", str(port), "--no-browser") == 1
    assert capsys.readouterr().err == (
        f"mola: port {port} of 127.0.0.1 is taken, perhaps by another explorer: choose another with --port.\n"
    )


@needs_gradio
def test_mistakes_are_one_line(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--reference", "val") == 1
    assert "goes with a posterior's folder" in capsys.readouterr().err
    assert run(monkeypatch, str(tmp_path), "--port", "0", "--no-browser", "--quiet") == 1
    captured = capsys.readouterr().err
    assert captured.startswith(f"mola: {tmp_path} holds no job.toml")
    assert captured.count("\n") == 1


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OptionError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)
    with pytest.raises(OptionError, match=r"--host no\.such\.host\.invalid is no address"):
        listen("no.such.host.invalid", 0)


def test_a_missing_extra_is_named_with_its_remedy():
    outcome = run_python(
        "-c",
        "import sys; sys.modules['gradio'] = None; sys.argv = ['mola', 'explore', '--no-browser']\n"
        "from mola.__main__ import main; main()",
    )
    assert outcome.returncode == 1
    assert outcome.stderr == (
        "mola: the explorer needs gradio, which is not installed. Install it with: pip install 'mola-torch[explore]' "
        "(in a clone of the repository: pip install '.[explore]')\n"
    )


@pytest.mark.slow  # a server in a process of its own is also what tests/app/test_explore_hostile.py asks
@needs_gradio
def test_it_serves_a_page_and_ctrl_c_ends_it_quietly(folder, desk):
    code = "from mola.__main__ import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(desk.root), *sys.path]), "OMP_NUM_THREADS": "1"}
    arguments = ["explore", str(folder), "--port", "0", "--no-browser", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=desk.root,
        env=environment,
    ) as server:
        try:
            line = server.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+/", line).group(0)
            with urllib.request.urlopen(address, timeout=PATIENCE) as page:
                text = page.read().decode()
                policy = page.headers["content-security-policy"]
            server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=PATIENCE)
        finally:
            server.kill()
    assert "mola explorer" in text
    assert "default-src 'self'" in policy
    assert server.returncode == 0, err
    assert "Traceback" not in out + err
    assert not [one for one in err.splitlines() if " % " not in one]  # progress, and nothing else


# --- real networks ------------------------------------------------------------------------------------------------------


@pytest.mark.real_data
@pytest.mark.filterwarnings("ignore::mola.errors.MolaWarning")
def test_real_colour_networks_are_explored(tmp_path, monkeypatch):
    """CIFAR-10 through pretrained ResNet-20s: recognised; and noise is more outlying than nearly all of it."""
    torch.set_default_dtype(torch.float32)
    weights, folder = require_shared("networks/resnet20"), require_shared("cifar10")
    with Image.open(folder / "test_batch.webp") as mosaic:  # tiles of 32 x 32, 100 to a row
        rows = np.array(mosaic.crop((0, 0, 3200, 96)))
    images = rows.reshape(3, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(300, 32, 32, 3)
    labels = np.fromfile(folder / "test_batch.labels", np.uint8)[:300].astype(np.int64)
    monkeypatch.chdir(tmp_path)
    for name, part in (("train", slice(0, 200)), ("val", slice(200, 300))):
        np.savez(f"{name}.npz", x=images[part], y=labels[part])
    files = tuple(str(weights / f"0{index}.safetensors") for index in range(2))
    job = Job(("resnet-20",), files, train="train.npz", val="val.npz", normalise="imagenet")
    run_fit(job, tmp_path / "posterior")
    subject = open_subject(tmp_path / "posterior")
    explorer = Explorer(subject)
    pictures = torch.from_numpy(images[:20]).permute(0, 3, 1, 2)
    right = [explorer.look(one, NEUTRAL).label("MoLA") == label for one, label in zip(pictures, labels, strict=False)]
    assert sum(right) >= 15
    noise = next(one for one in subject.examples if one.name == "noise")
    assert subject.reference.share_below(explorer.look(noise.pixels, NEUTRAL).score) > 0.9
