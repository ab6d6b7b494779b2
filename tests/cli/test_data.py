"""Data as a user names them: what cannot be used is named and left out, and the rest goes on."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import molaplace as mola
from molaplace.data.arrays import open_arrays
from molaplace.data.dataset import Loader, SkippedInputs
from molaplace.data.opening import FunctionDataset, open_dataset
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import DataError, OptionError
from tests.closeness import assert_close
from tests.workspace import CLASSES, Workspace, job_for, run_fit

pytestmark = pytest.mark.usefixtures("_in_workspace")


INTAKE = Preprocessing(mode="RGB", shape=(3, 6, 6), batch_size=5)


def copy_of(workspace: Workspace, split: str, folder: Path) -> Path:
    shutil.copytree(workspace.root / split, folder)
    return folder


def spoil(folder: Path) -> dict[str, str]:
    """Malformed files of every kind, and what is to be said of each."""
    cat = folder / "cat"
    draw = np.random.default_rng(1)
    whole = next(cat.glob("*.png")).read_bytes()
    (cat / "corrupt.png").write_bytes(whole[:60])
    (cat / "empty.png").write_bytes(b"")
    (cat / "text.jpg").write_text("no image")
    Image.fromarray(draw.integers(0, 255, (9, 6, 3)).astype(np.uint8)).save(cat / "tall.png")
    return {
        "cat/corrupt.png": "cannot be decoded",
        "cat/empty.png": "cannot be decoded",
        "cat/text.jpg": "cannot be decoded",
        "cat/tall.png": "9 x 6 pixels",
    }


def test_malformed_images_are_left_out_by_name_and_the_rest_goes_on(workspace, tmp_path):
    folder = copy_of(workspace, "train", tmp_path / "train")
    expected = spoil(folder)
    skipped = SkippedInputs()
    loader = Loader(open_dataset(str(folder), INTAKE, labelled=True), skipped)
    inputs, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    good_inputs, good_labels = workspace.inputs("train")
    assert torch.equal(labels, good_labels)
    assert torch.equal(inputs, good_inputs)
    reasons = skipped.left_out[str(folder)]
    assert reasons.keys() == expected.keys()
    assert all(words in reasons[name] for name, words in expected.items())
    assert len(skipped) == 4
    list(loader)
    assert len(skipped) == 4, "read twice, counted once"
    assert any("4 inputs left out" in line for line in skipped.lines())
    assert any("and 1 more" in line for line in skipped.lines(most=3))
    with pytest.raises(DataError, match=r"(cannot be decoded|pixels).*with --strict, no input may be left out"):
        list(Loader(loader.source, SkippedInputs(), strict=True))


def test_linked_and_unreadable_images_are_counted_alike_with_and_without_labels(workspace, tmp_path):
    folder = tmp_path / "linked"
    folder.mkdir()
    for name in CLASSES:
        (folder / name).symlink_to(workspace.root / "train" / name)
    count = len(workspace.inputs("train")[1])
    for labelled in (True, False):
        assert open_dataset(str(folder), INTAKE, labelled=labelled).count == count
    copy = copy_of(workspace, "train", tmp_path / "copy")
    (copy / "cat" / "broken.png").symlink_to(tmp_path / "gone")
    Image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(copy / "cat" / "moving.gif")
    for labelled in (True, False):
        skipped = SkippedInputs()
        loader = Loader(open_dataset(str(copy), INTAKE, labelled=labelled), skipped, labelled=labelled)
        assert sum(len(inputs) for inputs, *_ in loader) == count
        reasons = skipped.left_out[str(copy)]
        assert reasons.keys() == {"cat/broken.png", "cat/moving.gif"}
        assert "does not exist" in reasons["cat/broken.png"]
        assert "convert" in reasons["cat/moving.gif"]


def test_names_of_classes_that_are_not_utf8_are_escaped(workspace, tmp_path, mola_command):
    for split in ("train", "val"):
        copy = copy_of(workspace, split, tmp_path / split)
        (copy / "fox").rename(copy / os.fsdecode(b"f\xe9x"))
    words = ["fit", *workspace.weights(), "--network", f"{workspace.module}:build", "--output", tmp_path / "posterior"]
    code, output, error = mola_command(*words, "--train", tmp_path / "train", "--val", tmp_path / "val")
    assert code == 0, error
    assert r"f\xe9x" in output
    words = ["predict", tmp_path / "posterior", tmp_path / "val", "--output", tmp_path / "rows.csv"]
    assert mola_command(*words)[0] == 0
    assert r"f\xe9x" in (tmp_path / "rows.csv").read_text()


@pytest.mark.parametrize("label", [2**32 + 1, 2**40, -(2**31) - 1])
def test_dense_labels_are_not_wrapped(tmp_path, label):
    labels = np.zeros((2, 3, 3), np.int64)
    labels[0, 0, 0] = label
    np.savez(tmp_path / "set.npz", x=np.zeros((2, 1, 3, 3), np.float32), y=labels)
    opened = open_arrays(tmp_path / "set.npz", Preprocessing(), labelled=True)
    assert int(opened.labels[0, 0, 0]) == label


@pytest.mark.parametrize(
    "labels", [np.array([0, 2**64 - 100], np.uint64), np.array([0, 1e19]), np.array([0, -np.inf])], ids=str
)
def test_labels_beyond_every_index_are_named(tmp_path, labels):
    np.savez(tmp_path / "set.npz", x=np.zeros((2, 4), np.float32), y=labels)
    with pytest.raises(
        DataError, match=r"expected class indices from 0 as labels, got (18446744073709551516|1e\+19|-inf)"
    ):
        open_arrays(tmp_path / "set.npz", Preprocessing(), labelled=True)


@pytest.mark.parametrize("digits", [16, 19, 5000])
def test_long_labels_in_a_csv_are_named(workspace, tmp_path, digits):
    (tmp_path / "set.csv").write_text(f"path,label\na.png,0\nb.png,1{'0' * (digits - 1)}\n")
    with pytest.raises(DataError, match=r"expected class indices from 0.*got '10+' for b\.png"):
        open_dataset(str(tmp_path / "set.csv"), INTAKE, labelled=True)


def test_a_label_that_marks_nothing_is_not_proposed_as_a_mark(workspace):
    inputs, labels = workspace.inputs("train")
    for label, proposed in ((255, True), (10**12, False)):
        wrong = labels.clone()
        wrong[0] = label
        with pytest.raises(DataError, match=r"labels must lie in \[0, 2\]") as refusal:
            mola.fit(workspace.networks(1), [(inputs, wrong)])
        assert ("ignore_index" in str(refusal.value)) == proposed


def test_what_most_images_are_is_what_all_should_be(workspace, tmp_path):
    """A first image of another size or colour does not make all others wrong."""
    folder = copy_of(workspace, "train", tmp_path / "train")
    Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(folder / "cat" / "000-first.png")
    result = run_fit(job_for(workspace, train=str(folder)), tmp_path / "posterior")
    assert result["result"]["preprocessing"]["shape"] == [3, 6, 6]
    assert result["result"]["preprocessing"]["mode"] == "RGB"
    assert list(result["left_out"][str(folder)]) == ["cat/000-first.png"]
    assert result["result"]["left_out"] == 1


def archive(**arrays):
    return lambda root: np.savez(root / "set.npz", **arrays)


def text(name, content):
    return lambda root: (root / name).write_bytes(content.encode(errors="surrogateescape"))


def cut_array(root):
    np.save(root / "set.npy", np.zeros((10, 3)))
    (root / "set.npy").write_bytes((root / "set.npy").read_bytes()[:-20])


ROWS = np.zeros((2, 2))
LABELS = np.zeros(2)
NO_DATA = {
    # what is made in a folder, the data that are named there, and words of the error
    "an empty folder": (lambda root: (root / "set").mkdir(), "set", "set has no subfolders"),
    "an unknown kind": (lambda root: (root / "set").touch(), "set", "set has an unknown format"),
    "nothing": (lambda root: None, "set", "unknown data '.*set': the file or folder does not exist"),
    "no subfolders": (lambda root: shutil.copytree("strange", root / "set"), "set", "its images have no labels"),
    "a subfolder too deep": (
        lambda root: shutil.copytree("train", root / "set" / "sets"),
        "set",
        "the subfolder 'sets'",
    ),
    "no column of labels": (text("set.csv", "path,kind\na.png,1\n"), "set.csv", "column 'label'"),
    "no column of paths": (text("set.csv", "place,label\na.png,1\n"), "set.csv", "column 'path'"),
    "a cell too many": (text("set.csv", "path,label\na.png,1\nb.png,1,2\n"), "set.csv", "row 2 .b.png. has more cells"),
    "a cell too many and no paths": (text("set.csv", "place,label\na.png,1,2\n"), "set.csv", "column 'path'"),
    "no text": (text("set.csv", "path,label\nx\x00,1\n\udcff"), "set.csv", "cannot be read as CSV"),
    "no inputs": (archive(a=ROWS), "set.npz", "contains no x or inputs"),
    "no labels": (archive(x=ROWS), "set.npz", r"set\.npz contains no y or labels"),
    "one number for each": (archive(x=LABELS, y=LABELS), "set.npz", "one row for each"),
    "empty inputs": (archive(x=ROWS[:0], y=LABELS[:0]), "set.npz", r"at least one input, got inputs of shape \(0, 2\)"),
    "long doubles": (archive(x=ROWS.astype(np.longdouble), y=LABELS), "set.npz", "at most 64 bits"),
    "a label too many": (archive(x=ROWS, y=np.zeros(3)), "set.npz", "expected 2 rows"),
    "objects": (archive(x=ROWS, y=np.array([{}, []], dtype=object)), "set.npz", "cannot be read"),
    "a cut array": (cut_array, "set.npy", "cannot be read"),
}


@pytest.mark.parametrize("case", NO_DATA)
def test_data_that_are_none_are_refused_in_words(tmp_path, case):
    make, name, words = NO_DATA[case]
    make(tmp_path)
    with pytest.raises((DataError, OptionError), match=words) as caught:
        open_dataset(str(tmp_path / name), INTAKE, labelled=True, classes=CLASSES)
    assert name in str(caught.value)


def test_rows_of_a_csv_that_cannot_be_used_are_named(workspace, tmp_path):
    picture = next((workspace.root / "train" / "dog").iterdir())
    lines = ["path,label", f"{picture},dog", f"{picture},wolf", f"{picture},", ",dog", "gone.png,fox"]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    source = open_dataset(str(tmp_path / "list.csv"), INTAKE, labelled=True, classes=CLASSES)
    rows = next(source.batches())
    assert rows.labels.tolist() == [1]
    assert rows.errors == [
        None,
        "has the unknown label 'wolf'",
        "has the unknown label ''",
        "is not a file",
        "does not exist",
    ]
    unlabelled = next(open_dataset(str(tmp_path / "list.csv"), INTAKE, labelled=False).batches())
    assert len(unlabelled.inputs) == 3
    (tmp_path / "list.csv").write_text(f"path,label\n{picture},1\n{picture},2\n")
    numbered = open_dataset(str(tmp_path / "list.csv"), INTAKE, labelled=True, classes=CLASSES)
    assert next(numbered.batches()).labels.tolist() == [1, 2]


def test_nothing_that_can_be_used_is_an_error_with_the_first_reason(workspace, tmp_path):
    (tmp_path / "set" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "cat" / "a.png").write_text("no image")
    with pytest.raises(DataError, match=r"contains no usable inputs. The first error: cat/a.png: cannot be decoded"):
        list(Loader(open_dataset(str(tmp_path / "set"), INTAKE, labelled=True), SkippedInputs()))
    with pytest.raises(DataError, match="contains no images that can be decoded"):
        run_fit(job_for(workspace, train=str(tmp_path / "set")), tmp_path / "posterior")


def test_arrays_are_read_in_portions_and_rows_without_numbers_left_out(tmp_path):
    values = np.random.default_rng(0).normal(size=(11, 4))
    values[3, 1], values[7, :2] = np.nan, np.inf
    labels = np.arange(11) % 3
    np.savez_compressed(tmp_path / "set.npz", inputs=np.asfortranarray(values), labels=labels)
    np.save(tmp_path / "set.npy", values)
    preprocessing = Preprocessing(batch_size=4, dtype="float64")
    source = open_arrays(tmp_path / "set.npz", preprocessing, labelled=True)
    assert source.count == 11
    batches = list(source.batches())
    assert [len(batch.names) for batch in batches] == [4, 4, 3]
    errors = {name: words for batch in batches for name, words in zip(batch.names, batch.errors, strict=True) if words}
    assert errors == {
        "set.npz[3]": "contains 1 value that is NaN or infinite",
        "set.npz[7]": "contains 2 values that are NaN or infinite",
    }
    indices = [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert np.array_equal(torch.cat([batch.inputs for batch in batches]).numpy(), values[indices])
    assert torch.cat([batch.labels for batch in batches]).tolist() == labels[indices].tolist()
    alone = list(open_arrays(tmp_path / "set.npy", preprocessing, labelled=False).batches())
    assert np.array_equal(torch.cat([batch.inputs for batch in alone]).numpy(), values[indices])


def test_bytes_are_pixels_in_any_layout(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3)).astype(np.uint8)
    preprocessing = Preprocessing(mean=(0.5,), std=(0.25,))
    expected = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    for name, values in (("last", pixels), ("first", pixels.transpose(0, 3, 1, 2))):
        np.savez(tmp_path / f"{name}.npz", x=values)
        (rows,) = open_arrays(tmp_path / f"{name}.npz", preprocessing, labelled=False).batches()
        assert_close(rows.inputs, expected)
    np.savez(tmp_path / "grey.npz", x=pixels[..., 0])
    (rows,) = open_arrays(tmp_path / "grey.npz", preprocessing, labelled=False).batches()
    assert_close(rows.inputs, expected[:, :1])


def test_digits_by_name():
    digits = open_dataset("digits:val", Preprocessing(batch_size=100), labelled=True)
    assert digits.count == 297
    assert sum(len(rows.labels) for rows in digits.batches()) == 297
    with pytest.raises(OptionError, match="the split of digits must be one of train, val, test"):
        open_dataset("digits:vall", Preprocessing(), labelled=True)
    with pytest.raises(DataError, match=r"digits:val contains inputs of shape \(1, 8, 8\); expected \(3, 6, 6\)"):
        list(open_dataset("digits:val", INTAKE, labelled=True).batches())


def test_own_functions_and_what_can_go_wrong_in_them(workspace, tmp_path):
    source = open_dataset(f"{workspace.module}:mappings", Preprocessing(), labelled=True, outputs=3)
    first = next(iter(Loader(source, SkippedInputs())))
    assert first.keys() == {"input", "labels"}
    for name, words in (
        ("gone", "no attribute 'gone'"),
        ("number", "is not a function"),
        ("failing", "failed .RuntimeError: the disk is gone"),
    ):
        with pytest.raises((OptionError, DataError), match=words):
            list(open_dataset(f"{workspace.module}:{name}", Preprocessing(), labelled=True, outputs=3).batches())


@pytest.mark.parametrize(
    "inputs", [[1, 2], torch.tensor(1.0), {"input": torch.ones(2, 4), "places": torch.arange(3)}], ids=str
)
def test_batches_without_a_row_for_each_input_are_refused_with_the_place(inputs):
    batch = inputs if isinstance(inputs, dict) else (inputs,)
    source = FunctionDataset(
        name="mine:batches", preprocessing=Preprocessing(), function=lambda: [batch], labelled=False
    )
    with pytest.raises(DataError, match=r"batch 0 of mine:batches.*a row for each input"):
        list(source.batches())


def test_grey_of_16_bits_is_not_white(tmp_path):
    wide = np.linspace(0, 65535, 36).round().astype(np.uint16).reshape(6, 6)
    Image.fromarray(wide).save(tmp_path / "grey.png")
    Image.fromarray(wide.astype(np.float32)).save(tmp_path / "real.tif")
    rows = list(open_dataset(str(tmp_path), Preprocessing(mode="L"), labelled=False).batches())
    assert rows[0].names == ["grey.png", "real.tif"]
    np.testing.assert_allclose(rows[0].inputs[0, 0] * 65535, wide, atol=257)
    assert "range is unknown" in rows[0].errors[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (256, 224)),
        ({"crop": 192}, (256, 192)),
        ({"resize": 288}, (288, 224)),
        ({"resize": (160, 320)}, ((160, 320), None)),
        ({"resize": 160, "crop": 192}, (160, 192)),
    ],
    ids=str,
)
def test_options_replace_only_what_they_name_of_the_networks_preparation(options, expected):
    preprocessing = Preprocessing(resize=256, crop=224).changed(**options)
    assert (preprocessing.resize, preprocessing.crop) == expected


@pytest.mark.parametrize("option", ["mean", "std"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_normalisation_is_finite(option, value):
    with pytest.raises(OptionError, match=f"{option} must be finite"):
        Preprocessing().changed(**({"mean": (0.5,), "std": (1.0,)} | {option: (value,)}))
