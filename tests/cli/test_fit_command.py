"""Jobs: what `molaplace fit`, `predict` and `evaluate` do is what a program would have done, and their files tell it again."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import molaplace as mola
from molaplace.cli.folder import open_posterior
from molaplace.cli.info import print_information, read_information
from molaplace.cli.options import to_toml
from molaplace.errors import DataError, OptionError, StorageError
from tests import saved_files
from tests.closeness import assert_close
from tests.workspace import CLASSES, evaluated, job_for, run_fit

pytestmark = pytest.mark.usefixtures("_in_workspace")


def test_a_job_is_what_a_program_would_have_done(workspace, fitted):
    train, val = ([workspace.inputs(split)] for split in ("train", "val"))
    expected = mola.fit(workspace.networks(), train, val, progress=False)
    assert_close(fitted.posterior.prior_precision, expected.prior_precision)
    inputs = workspace.inputs("test")[0]
    assert_close(fitted.posterior(inputs), expected(inputs))
    assert fitted.classes == CLASSES
    assert fitted.example.shape == (2, 3, 6, 6)
    assert fitted.example.dtype == torch.float32
    assert fitted.preprocessing.mode == "RGB"
    assert fitted.bundle.contents.made["result"]["outputs"] == 3


def test_networks_in_half_precision_are_fitted_checked_and_evaluated(workspace, fitted, tmp_path):
    summary = run_fit(job_for(workspace, network=(f"{workspace.module}:half",)), tmp_path / "posterior")
    metrics, expected = (
        result["validation"]["metrics"] for result in (summary["result"], fitted.bundle.contents.made["result"])
    )
    assert abs(metrics["nll"] - expected["nll"]) < 0.05
    folder = open_posterior(tmp_path / "posterior", trust=True)
    assert folder.example.dtype == torch.bfloat16
    assert evaluated(folder, "test.npz").test.count == 18


@pytest.mark.parametrize("form", ["train.npz", "train.csv", "own_networks_for_test_fit_command:train"])
def test_every_form_of_the_same_data_gives_the_same_posterior(workspace, fitted, form, tmp_path):
    val = form.replace("train", "val")
    document = run_fit(job_for(workspace, train=form, val=val), tmp_path / "posterior")
    assert_close(document["result"]["prior_precision"], fitted.posterior.prior_precision)
    assert_close(
        document["result"]["validation"]["metrics"],
        fitted.bundle.contents.made["result"]["validation"]["metrics"],
        "difference",
    )
    assert document["result"]["inputs"] == [asdict(tensor) for tensor in fitted.bundle.contents.inputs.tensors]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"rule": "nll"}, mola.rules.Score("nll")),
        ({"rule": "evidence"}, mola.rules.Evidence()),
        ({"rule": "threshold", "threshold": 0.6}, mola.rules.Threshold(confidence=0.6)),
        ({"rule": "distance", "price": 0.3}, mola.rules.Distance(price=0.3)),
    ],
    ids=lambda changes: changes.get("rule") if isinstance(changes, dict) else "",
)
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_rules_are_those_of_the_library(workspace, tmp_path, changes, rule):
    chosen = run_fit(job_for(workspace, **changes), tmp_path / "posterior")["result"]
    data = None if changes["rule"] == "evidence" else [workspace.inputs("val")]
    expected = mola.fit(workspace.networks(), [workspace.inputs("train")], progress=False).tune(
        data, rule=rule, progress=False
    )
    # A search on float32 outputs, whose objective is flat at its end.
    assert chosen["prior_precision"] == pytest.approx(expected.prior_precision, rel=1e-3)
    assert chosen["temperature"] == pytest.approx(expected.temperature, rel=1e-3)
    assert chosen["distance_exponent"] == pytest.approx(expected.distance_exponent, rel=1e-3)
    if changes.get("price") == 0.3:
        assert expected.distance_exponent > 0, "something is paid"


@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_outliers_stacking_structure_and_fixed_precision(workspace, tmp_path):
    exposed = run_fit(job_for(workspace, rule="outliers", outliers="strange"), tmp_path / "a")["result"]
    strange = torch.stack(
        [torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) for path in sorted(Path("strange").iterdir())]
    )
    plain = mola.fit(workspace.networks(), [workspace.inputs("train")], progress=False)
    rule = mola.rules.Outliers([strange.float() / 255])
    assert exposed["prior_precision"] == pytest.approx(
        plain.tune([workspace.inputs("val")], rule=rule, progress=False).prior_precision, rel=1e-3
    )
    run_fit(
        job_for(workspace, rule="none", prior_precision=2.5, mixing="stacking", structure="diag", link="mc"),
        tmp_path / "b",
    )
    opened = open_posterior(tmp_path / "b", trust=True).posterior
    assert (opened.prior_precision, opened.structure, opened.link.name) == ((2.5,) * 3, "diag", "mc")
    assert opened.weights.tolist() != pytest.approx([1 / 3] * 3), "stacking chose"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": None}, "no training data"),
        ({"network": ()}, "no network"),
        ({"val": None}, "needs validation data"),
        ({"val": None, "rule": "none", "mixing": "stacking"}, "--mixing stacking needs validation data"),
        ({"rule": "nll", "threshold": 0.9}, "--threshold applies only to --rule threshold"),
        ({"rule": "nll", "prior_precision": 2.0}, "--prior-precision applies only to --rule none"),
        ({"rule": "distance", "price": 2.0}, "price must be a number"),
        ({"rule": "distance", "val": None}, "--rule distance .*needs validation data"),
        ({"rule": "outliers"}, "both or neither"),
        ({"mean": (0.5,)}, "both --mean and --std"),
        ({"mean": (0.5,), "std": (1.0,), "normalise": "none"}, "both --mean and --std"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
    ids=str,
)
def test_a_job_that_cannot_be_done_says_so(workspace, tmp_path, changes, words):
    with pytest.raises(OptionError, match=words):
        run_fit(job_for(workspace, **changes), tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--mean", "nan"), ("--std", "inf"), ("--val", os.fsdecode(b"caf\xe9")), ("--output", os.fsdecode(b"caf\xe9"))],
)
def test_values_that_cannot_be_stored_are_named_before_any_work(workspace, tmp_path, mola_command, flag, value):
    shutil.copytree("val", tmp_path / os.fsdecode(b"caf\xe9"))
    value = value if flag in ("--mean", "--std") else str(tmp_path / value)
    words = ["fit", *workspace.weights(), "--network", f"{workspace.module}:build", "--train", "train", "--val", "val"]
    words += ["--output", tmp_path / "posterior", "--mean", "0.5", "--std", "1", flag, value]
    code, _, error = mola_command(*words)
    assert code == 1
    assert f"molaplace: {flag} must be" in error
    assert not (tmp_path / "posterior").exists()


def test_flags_override_the_file_in_both_directions(workspace, tmp_path, mola_command):
    (tmp_path / "broken").mkdir()
    for name in CLASSES:
        shutil.copytree(f"train/{name}", tmp_path / "broken" / name)
    (tmp_path / "broken" / "cat" / "broken.png").write_bytes(b"no picture")
    job = job_for(workspace, train=str(tmp_path / "broken"))
    for number, strict in enumerate((True, False)):
        path = tmp_path / f"{strict}.toml"
        path.write_text(to_toml(replace(job, strict=strict).as_document()))
        words = ("fit", "--config", path, "--trust", "--output", tmp_path / f"posterior-{number}")
        assert mola_command(*words)[0] == (1 if strict else 3)
        code, _, error = mola_command(*words, "--no-strict" if strict else "--strict")
        assert code == (3 if strict else 1), error


def test_a_moved_folder_says_what_it_misses_and_what_to_do(workspace, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    for path in (*workspace.weights(), workspace.root / "val.npz", workspace.root / "test.npz"):
        shutil.copy(path, home)
    weights = tuple(str(home / Path(path).name) for path in workspace.weights())
    job = job_for(workspace, weights=weights, val=str(home / "val.npz"))
    run_fit(job, home / "bundle", bundle=True)
    run_fit(job, home / "plain")
    away = tmp_path / "away"
    away.mkdir()
    for name in ("bundle", "plain"):
        shutil.move(home / name, away / name)
    shutil.copy(home / "test.npz", away)
    shutil.move(home / "val.npz", away / "validation.npz")
    with pytest.raises(OptionError, match=r"home/val\.npz, which do not exist.*with --val DATA") as caught:
        evaluated(open_posterior(away / "bundle", trust=True), str(away / "test.npz"))
    assert "test.npz" not in str(caught.value), "the test data are no validation data"
    again = open_posterior(away / "bundle", trust=True)
    assert evaluated(again, str(away / "test.npz"), val=str(away / "validation.npz")).test.count
    with pytest.raises(
        StorageError, match=r"away/0\.safetensors cannot be read.*molaplace fit --config .*plain/job\.toml --bundle"
    ):
        open_posterior(away / "plain", trust=True)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda bundle: bundle["preparation"].update(mean="a"), r"bundle\.preparation\.mean"),
        (
            lambda bundle: bundle["made"]["result"]["validation"].update(outlier_threshold="x"),
            r"made\.result\.validation",
        ),
    ],
)
def test_a_garbled_result_is_named(fitted, tmp_path, change, place):
    copy = shutil.copytree(fitted.folder, tmp_path / "posterior")
    saved_files.edit(copy / "posterior.safetensors", lambda document, _: change(document["bundle"]))
    with pytest.raises(StorageError, match=f"damaged at '{place}"):
        print_information(Console(), read_information(copy))


def test_weights_that_changed_or_went_are_named(workspace, tmp_path):
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for path, source in zip(paths, workspace.weights(), strict=False):
        shutil.copy(source, path)
    run_fit(job_for(workspace, weights=tuple(map(str, paths))), tmp_path / "posterior")
    shutil.copy(workspace.weights()[2], paths[1])
    with pytest.raises(StorageError, match=r"networks\[1\].*differ.*Restore"):
        open_posterior(tmp_path / "posterior", trust=True)
    paths[1].unlink()
    with pytest.raises(StorageError, match=r"networks\[1\].*1\.safetensors cannot be read.*Restore"):
        open_posterior(tmp_path / "posterior", trust=True)


def test_a_folder_that_is_none_is_refused(workspace, tmp_path, fitted):
    with pytest.raises(StorageError, match="contains no posterior"):
        open_posterior(tmp_path, trust=True)
    fitted.posterior.save(tmp_path / "by-program")
    with pytest.raises(StorageError, match="without its networks"):
        open_posterior(tmp_path / "by-program", trust=True)
    with pytest.raises(OptionError, match="device 'meta' cannot be used"):  # there is one, but it holds no numbers
        open_posterior(fitted.folder, device="meta", trust=True)
    with pytest.raises(StorageError, match="contains no posterior"):
        read_information(tmp_path)


def test_classes_in_another_order_are_noticed_and_the_advice_mends_it(workspace, tmp_path):
    """Folders named so that their alphabetical order is not the networks'."""
    new = {"cat": "zebra", "dog": "ant", "fox": "mole"}
    for split in ("train", "val"):
        for old, name in new.items():
            shutil.copytree(workspace.root / split / old, tmp_path / split / name)
    job = job_for(workspace, train=str(tmp_path / "train"), val=str(tmp_path / "val"))
    with pytest.raises(DataError, match=r"a different order.*ant, mole, zebra.*--classes"):
        run_fit(job, tmp_path / "posterior")
    result = run_fit(replace(job, classes=("zebra", "ant", "mole")), tmp_path / "posterior")
    assert result["result"]["validation"]["metrics"]["accuracy"] > 0.8


def test_the_number_of_classes_must_be_the_networks(workspace, tmp_path):
    with pytest.raises(DataError, match=r"2 classes .a, b. for a network with 3 outputs"):
        run_fit(job_for(workspace, train="train.npz", classes=("a", "b")), tmp_path / "posterior")
    for number in (2, 4):
        words = "for a network with 3 outputs"
        with pytest.raises(DataError, match=words):
            run_fit(job_for(workspace, train="train", classes=number), tmp_path / "posterior")
    with pytest.raises(DataError, match="'cat', which is not one of the 3 classes"):
        run_fit(job_for(workspace, classes=("a", "b", "c")), tmp_path / "posterior")
