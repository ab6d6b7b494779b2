"""The UCI regression sets: what is read, how rows are divided, and what a comparison leaves on disk."""

import json

import numpy as np
import pytest
import torch

from molaplace.errors import DataError, OptionError, StorageError
from molaplace_lab.training import Recipe
from molaplace_lab.uci import comparison
from molaplace_lab.uci.comparison import UCI_METHODS, read_records, run_uci
from molaplace_lab.uci.data import SETS, read_uci
from molaplace_lab.uci.tables import as_good, gap_table, score_table
from tests.conftest import require_shared


@pytest.fixture
def folder(tmp_path):
    """A made-up set in the published form, under the name of a real one."""
    folder_of_set = tmp_path / "data" / "yacht"
    folder_of_set.mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = random.normal(size=(90, 3))
    target = np.sin(rows[:, :1]) * 5 + 30 + 0.3 * random.normal(size=(90, 1))
    np.savetxt(folder_of_set / "data.txt", np.hstack([rows, target]))
    np.savetxt(folder_of_set / "index_features.txt", [0, 1, 2])
    np.savetxt(folder_of_set / "index_target.txt", [3])
    for split in range(2):
        np.savetxt(folder_of_set / f"index_test_{split}.txt", random.permutation(90)[:9])
    return tmp_path / "data"


def test_every_row_is_for_training_or_testing_and_standardised_by_training_alone(folder):
    data = read_uci(folder, "yacht")
    for split in (data.split(0), data.split(1), data.gap(0), data.gap(2)):
        inputs, targets = split.train
        assert len(inputs) + len(split.test[0]) == 90
        assert torch.allclose(inputs.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(targets.std(correction=0), torch.ones((), dtype=torch.float64))
        every = torch.cat([targets * split.scale + split.location, split.test[1]])
        assert torch.allclose(every.sort(0).values, data.targets.sort(0).values)
    gap = data.gap(1)
    inside = gap.test[0][:, 1]
    outside = gap.train[0][:, 1]
    assert not bool(((outside > inside.min()) & (outside < inside.max())).any())


def test_files_that_are_missing_or_garbled_are_named(folder):
    with pytest.raises(DataError, match=r"concrete.data\.txt does not exist"):
        read_uci(folder, "concrete")
    with pytest.raises(OptionError, match="set must be one of"):
        read_uci(folder, "boats")
    (folder / "yacht" / "index_test_1.txt").write_text("1\n1\n", encoding="utf-8")
    with pytest.raises(DataError, match="distinct whole numbers"):
        read_uci(folder, "yacht")
    for path in (folder / "yacht").glob("index_test_*"):
        path.unlink()
    with pytest.raises(DataError, match="the first published split"):
        read_uci(folder, "yacht")


def test_a_comparison_leaves_a_record_for_each_split_and_makes_none_twice(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "RECIPE", Recipe(epochs=15, batch_size=16, learning_rate=1e-2, optimiser="adam"))
    monkeypatch.setattr(comparison, "MEMBERS", 2)
    monkeypatch.setattr(comparison, "SWAG_EPOCHS", 2)
    records_folder = run_uci(folder, tmp_path / "results", ("yacht",), splits=2, gaps=True)
    files = sorted(path.name for path in records_folder.glob("*/*.json"))
    assert files == ["gap-0.json", "gap-1.json", "gap-2.json", "split-0.json", "split-1.json"]
    times = {path: path.stat().st_mtime_ns for path in records_folder.glob("*/*.json")}
    run_uci(folder, tmp_path / "results", ("yacht",), splits=2, gaps=True)
    assert times == {path: path.stat().st_mtime_ns for path in records_folder.glob("*/*.json")}
    records = read_records(tmp_path / "results")
    for score in ("rmse", "nll"):
        _, _, row = score_table(records, score).split("\n")
        means = [sum(record["methods"][method][score] for record in records[3:]) / 2 for method in UCI_METHODS]
        assert "| yacht | 2 | " in row
        for mean, cell in zip(means, row.split(" | ")[2:], strict=True):
            assert float(cell.strip("*| ").split()[0]) == pytest.approx(mean, abs=0.006)
        assert as_good(records, score).loc["yacht", UCI_METHODS[means.index(min(means))]]
    assert gap_table(records).count("| yacht | 3 |") == 5
    damaged = next(iter(times))
    damaged.write_text(json.dumps({"format": "mola-uci"}), encoding="utf-8")
    with pytest.raises(StorageError, match="Delete it"):
        read_records(tmp_path / "results")


@pytest.mark.real_data
def test_the_published_splits_are_read():
    folder = require_shared("uci")
    for name in SETS:
        data = read_uci(folder, name)
        assert len(data.tests) == (5 if name == "protein-tertiary-structure" else 20)
        assert all(abs(len(test) - len(data.inputs) / 10) < 2 for test in data.tests)
