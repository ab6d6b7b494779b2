"""`molaplace watch`: the library's numbers, a log that survives kills, and refusals in words."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from filelock import FileLock

import molaplace as mola
from molaplace.cli.watch import validation_baseline
from molaplace.monitoring.baseline import Baseline
from molaplace.monitoring.watching import Watch
from tests.cli.fitted_folders import draw
from tests.cli.fitted_folders import run as run_command
from tests.pages import Page

pytestmark = pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")

CLASSES = pytest.mark.parametrize("kind", ["classes"], indirect=True)


@pytest.fixture
def watch_command(kind, tmp_path):
    """Run the command on arrays; the log is in the test's own folder."""

    def run(x, *more, name="new.npz", log="watch.jsonl"):
        np.savez(tmp_path / name, x=np.asarray(x, dtype=np.float32))
        return run_command(
            "watch", kind.posterior, tmp_path / name, "--log", tmp_path / log, "--trust", "--quiet", *more
        )

    return run


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def usual(seed, count=400):
    return draw("classes", count, 100 + seed)[0]


@CLASSES
def test_the_log_and_the_page_hold_what_the_library_says(kind, watch_command, tmp_path):
    for seed in range(2):
        outcome = watch_command(usual(seed))
        assert outcome.exit_code == 0, outcome.output
    lines = lines_of(tmp_path / "watch.jsonl")
    assert [line["size"] for line in lines] == [400, 400]
    assert lines[-1]["inputs"] == 800

    fitted = kind.open()
    saved = Watch.load(tmp_path / "watch.jsonl.state")
    watch = mola.watch(fitted.posterior, [kind.data("val")])
    for seed in range(2):
        x = torch.from_numpy(usual(seed))
        scores = fitted.posterior.predict(x).ood_score.double().numpy()
        counted = saved.streams[0].window["score"][400 * seed : 400 * (seed + 1)]
        assert np.sort(counted) == pytest.approx(np.sort(scores), abs=1e-5), "each input of a run, in another order"
        order = np.argsort(scores)[np.argsort(np.argsort(counted))]
        watch.update(fitted.posterior.predict(x[order]))
    assert saved.baseline.quantiles == pytest.approx(watch.baseline.quantiles, abs=1e-6)
    assert saved.accuracy.value == pytest.approx(watch.accuracy.value)
    assert saved.alarm.evidence == pytest.approx(watch.alarm.evidence, abs=1e-6)
    assert lines[-1]["evidence"] == saved.alarm.now
    assert (lines[-1]["accuracy"], lines[-1]["low"]) == (saved.accuracy.value, saved.accuracy.low)
    page = Page((tmp_path / "watch.html").read_text())
    assert "No alarm" in page.text
    assert "Expected accuracy of the last 800 inputs" in page.text
    assert "2 runs" in page.text


@CLASSES
def test_an_alarm_is_an_exit_code_and_a_sentence(watch_command, tmp_path):
    assert watch_command(usual(0), "--recent", 300).exit_code == 0
    outcome = watch_command(8 * usual(1), "--recent", 300)
    assert outcome.exit_code == 3
    page = (tmp_path / "watch.html").read_text()
    assert "ALARM: the inputs no longer look like the validation data" in page
    assert watch_command(usual(2), "--recent", 300).exit_code == 3, "an alarm stays"
    last = lines_of(tmp_path / "watch.jsonl")[-1]
    assert abs(last["began"] - 400) < 30


@CLASSES
def test_three_lines_and_json(kind, tmp_path):
    np.savez(tmp_path / "new.npz", x=usual(0))
    command = ["watch", kind.posterior, tmp_path / "new.npz", "--log", tmp_path / "log.jsonl", "--trust"]
    outcome = run_command(*command)
    assert [line.split(":")[0] for line in outcome.stdout.splitlines()] == [
        "No alarm",
        "Expected accuracy of the last 400 inputs",
        "Strangest inputs of this run, with their outlier scores",
    ]
    page = (tmp_path / "log.html").read_text()
    again = run_command(*command)
    assert "all inputs of this run were in the log before" in again.stdout
    assert (tmp_path / "log.html").read_text() == page, "the pictures stay"
    summary = json.loads(run_command(*command, "--json").stdout)
    assert (summary["inputs"], summary["alarm"]["raised"], summary["left_out"]) == (400, False, {})
    assert len(lines_of(tmp_path / "log.jsonl")) == 1, "inputs are counted once"


@CLASSES
def test_a_delivery_that_grows_is_counted_once(watch_command, tmp_path):
    x = usual(0)
    whole, grown = (tmp_path / f"{name}.jsonl.state" for name in ("whole", "grown"))
    watch_command(x, log="whole.jsonl")
    for count in (100, 300, 300, 400):
        assert watch_command(x[:count], log="grown.jsonl").exit_code == 0
    lines = lines_of(tmp_path / "grown.jsonl")
    assert [line["size"] for line in lines] == [100, 200, 100]
    assert Watch.load(grown).accuracy.value == pytest.approx(Watch.load(whole).accuracy.value)
    watch_command(x[::-1], log="grown.jsonl")
    assert Watch.load(grown).count == 800, "other contents under the same names are new inputs"


@CLASSES
def test_a_folder_sorted_by_class_is_no_change(kind, watch_command, tmp_path):
    posterior = kind.open().posterior
    x, labels = draw("classes", 1200, 300)
    watch = mola.watch(posterior, [kind.data("val")])
    order = np.argsort(labels, kind="stable")
    assert watch.update(posterior.predict(torch.from_numpy(x[order]))).alarm, "in the order of the folder, it is one"
    assert watch_command(x, log="shuffled.jsonl").exit_code == 0
    assert watch_command(x[order], log="sorted.jsonl").exit_code == 0


@CLASSES
def test_an_alarm_of_low_scores_shows_its_inputs_and_doubts_the_accuracy(kind, tmp_path):
    many = usual(1, 4000)
    low = np.argsort(kind.open().posterior.predict(torch.from_numpy(many)).ood_score.numpy())[:200]
    np.savez(tmp_path / "new.npz", x=np.concatenate([many[low], usual(0)]))
    outcome = run_command("watch", kind.posterior, tmp_path / "new.npz", "--log", tmp_path / "log.jsonl", "--trust")
    assert outcome.exit_code == 3, outcome.output
    _, accuracy, shown = outcome.stdout.splitlines()
    assert "After an alarm, check it with labels" in accuracy
    assert shown.startswith("Inputs of this run that are the strongest evidence of the change")
    watch = Watch.load(tmp_path / "log.jsonl.state")
    scores = [float(score) for score in re.findall(r"\((-?[0-9.]+)\)", shown)]
    assert len(scores) == 3
    assert max(scores) < watch.baseline.quantiles[0], shown
    text = Page((tmp_path / "log.html").read_text()).text
    assert "After an alarm, check it with labels" in text
    assert "at most a moderate shift" in repr(watch)


@CLASSES
def test_a_killed_run_has_counted_nothing_and_a_run_writes_once(watch_command, tmp_path, monkeypatch):
    watch_command(usual(0), log="whole.jsonl")
    watch_command(usual(1), log="whole.jsonl")
    watch_command(usual(0))
    writes = []

    def die(*arguments, **settings):
        writes.append(arguments)
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr("molaplace.cli.watch.replacing", die)
        assert watch_command(usual(1, 5000)).exit_code == 9
    assert len(writes) == 1
    assert len(lines_of(tmp_path / "watch.jsonl")) == 1
    assert watch_command(usual(1)).exit_code == 0

    def known(line):
        return {name: value for name, value in line.items() if name != "time"}

    lines, expected = (lines_of(tmp_path / name) for name in ("watch.jsonl", "whole.jsonl"))
    assert list(map(known, lines)) == list(map(known, expected))
    watch, whole = (Watch.load(tmp_path / f"{name}.jsonl.state") for name in ("watch", "whole"))
    assert watch.alarm == whole.alarm
    assert watch.accuracy == whole.accuracy


@CLASSES
def test_damage_and_mistakes_are_refused_in_words(watch_command, tmp_path):
    watch_command(usual(0))
    log = tmp_path / "watch.jsonl"
    state = tmp_path / "watch.jsonl.state"
    content = log.read_bytes()

    def refused(words, *more):
        before = log.read_bytes()
        outcome = watch_command(usual(1), *more)
        assert outcome.exit_code == 1
        assert words in outcome.stderr, outcome.stderr
        assert log.read_bytes() == before

    log.write_bytes(b"my own notes\n" + content)
    refused("changed since, so it is not replaced")
    log.write_bytes(content)
    refused("What differs: alpha (0.01, not 0.2).", "--alpha", "0.2")
    np.savez(tmp_path / "val.npz", x=usual(2, 120), y=np.arange(120) % 3)
    refused("What differs: the validation data.", "--val", tmp_path / "val.npz")
    shutil.move(state, tmp_path / "elsewhere")
    refused("is missing")
    shutil.move(tmp_path / "elsewhere", state)
    file = next(state.glob("*.safetensors"))
    saved = file.read_bytes()
    file.write_bytes(saved[:-9])
    refused("changed since, so it is not replaced")
    file.write_bytes(saved)
    with FileLock(tmp_path / ".watch.jsonl.lock"):
        refused("another process is writing")
    assert watch_command(usual(1)).exit_code == 0


@CLASSES
def test_unusable_inputs_are_left_out_and_named(kind, tmp_path):
    x = usual(0)
    x[5, 0] = np.nan
    np.savez(tmp_path / "new.npz", x=x)
    command = ["watch", kind.posterior, tmp_path / "new.npz", "--log", tmp_path / "log.jsonl", "--trust"]
    outcome = run_command(*command)
    assert outcome.exit_code == 0
    assert "1 input left out" in outcome.stderr
    assert lines_of(tmp_path / "log.jsonl")[-1]["inputs"] == 399
    assert run_command(*command, "--strict").exit_code == 1
    np.savez(tmp_path / "new.npz", x=np.full((3, 4), np.nan, dtype=np.float32))
    assert "no usable inputs" in str(run_command(*command).output)


@pytest.mark.parametrize("kind", ["labels", "regression", "maps"], indirect=True)
def test_other_outputs_are_watched_too(kind, tmp_path):
    np.savez(tmp_path / "new.npz", x=draw(kind.name, 360, 50)[0])
    command = ["watch", kind.posterior, tmp_path / "new.npz", "--log", tmp_path / "log.jsonl", "--trust"]
    if kind.name == "maps":
        assert "--val must name labelled data for dense outputs" in str(run_command(*command).output).replace(
            "val must", "--val must"
        )
    else:
        outcome = run_command(*command)
        assert outcome.exit_code == 0, outcome.output
        assert "cannot be estimated" in outcome.stdout
    outcome = run_command(*command[:4], tmp_path / "with-val.jsonl", "--trust", "--val", "val.npz", "--alpha", "0.001")
    assert outcome.exit_code == 0, outcome.output
    assert ("Expected accuracy" in outcome.stdout) == (kind.name != "regression")
    far = run_command(
        "watch", kind.posterior, "far.npz", *command[3:4], tmp_path / "with-val.jsonl", "--trust", "--val", "val.npz", "--alpha", "0.001"
    )  # fmt: skip
    if kind.name != "maps":  # ten inputs only
        assert far.exit_code == 3, far.output


def test_pictures_of_the_strangest_inputs(workspace, fitted, monkeypatch, tmp_path):
    monkeypatch.chdir(workspace.root)
    monkeypatch.syspath_prepend(str(workspace.root))
    outcome = run_command(
        "watch", fitted.folder, "test.npz", "--log", tmp_path / "log.jsonl", "--trust", "--recent", 50
    )
    assert outcome.exit_code in (0, 3), outcome.output
    page = Page((tmp_path / "log.html").read_text())
    assert sum(reference.startswith("data:image/png;base64,") for reference in page.references) == 12


@CLASSES
def test_the_stored_validation_columns_are_the_validation_data(kind):
    fitted = kind.open()
    stored = validation_baseline(fitted, None)
    read = Baseline.read(fitted.posterior, [kind.data("val")])
    assert stored.accuracy == read.accuracy
    assert stored.confidence.thresholds == pytest.approx(read.confidence.thresholds, abs=1e-6)
    assert stored.confidence.variance == pytest.approx(read.confidence.variance)
    assert stored.strange == pytest.approx(read.strange, abs=1e-6)
