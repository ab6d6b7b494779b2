"""Records computed afresh from the networks and the data equal the stored ones, cell by cell."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from molaplace_lab.commands import app
from molaplace_lab.records import Store
from tests.conftest import require_shared

ROOT = Path(__file__).resolve().parents[2]

TOLERANCES = {"nll": 1e-5, "log_likelihood": 1e-5, "brier": 1e-5, "confidence": 1e-5, "auroc": 1e-4, "accuracy": 2.5e-4}
"""Largest differences. Another processor rounds differently, so a few of 8000 predictions may fall on the other side of a bin's edge."""

BINNED = 1e-2
"""Largest difference of all other numbers, which depend on bins or on the order of nearly equal scores."""


def differences(values, stored, path=()):
    """Yield the path, the value and the stored value of each number in two nested mappings, if the values differ too much."""
    for name, value in values.items():
        if name == "types":  # results by type of corruption are stored with few digits
            continue
        path_of_entry = (*path, name)
        if isinstance(value, dict):
            yield from differences(value, stored[name], path_of_entry)
        elif isinstance(value, float) and abs(value - stored[name]) > TOLERANCES.get(name, BINNED):
            yield path_of_entry, value, stored[name]


def check_records(results, suite):
    """Compare all records of a suite in a results folder with the stored records."""
    store = Store(ROOT / "results")
    records = Store(results).records(suite)
    assert records
    for record in records:
        stored = store.read(suite, record.method, record.run)
        assert (record.networks, record.settings) == (stored.networks, stored.settings), record.method
        for part in ("labelled", "outliers"):
            assert list(differences(asdict(record)[part], asdict(stored)[part], (record.method, record.run))) == []


@pytest.mark.campaign
@pytest.mark.real_data
@pytest.mark.filterwarnings("ignore::molaplace.errors.MolaWarning")
def test_the_first_run_of_mnist(tmp_path):
    torch.set_default_dtype(torch.float32)
    for name, folder in (
        ("mnist", "MNIST"),
        ("fashion-mnist", "FashionMNIST"),
        ("emnist", "EMNIST"),
        ("kmnist", "KMNIST"),
    ):
        shutil.copytree(require_shared(name), tmp_path / folder / "raw")
    options = {"data": tmp_path, "networks": ROOT / "networks" / "mnist"}
    options |= {name: tmp_path / name for name in ("results", "cache")}
    arguments = [
        "bench",
        "mnist",
        "--quiet",
        "--components",
        "5",
        *(f"--{name}={path}" for name, path in options.items()),
    ]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    check_records(tmp_path / "results", "mnist")
