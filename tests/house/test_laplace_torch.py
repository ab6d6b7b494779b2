"""The comparison with laplace-torch: its records, and itself where it is installed."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ("compare_laplace_torch", "compare_laplace_torch_regression")


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_agrees_wherever_definitions_do(name):
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert record["tolerance"] <= 1e-8
    for row in record["same"]:
        assert max(row["difference"]) <= row.get("tolerance", record["tolerance"]), row
    compared = {(row["network"].removesuffix(" no bias").split("-")[-1], row["structure"]) for row in record["same"]}
    widths = {"1", "3"} if "regression" in name else {"5", "10"}
    assert compared == {(width, structure) for width in widths for structure in ("full", "diag", "kron-exact")}
    if "regression" in name:
        for quantity in ("mean", "weight covariance by output", "predictive variance", "log marginal likelihood"):
            assert sum(row["quantity"] == quantity for row in record["same"]) == 15


@pytest.mark.slow
def test_laplace_torch_itself_agrees(monkeypatch, capsys):
    """Runs only if the environment exists: creating it takes minutes and needs the package index."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    environment = importlib.import_module("peer_environment")
    if not (environment.cache_folder() / "ready.json").exists():
        pytest.skip("NO LAPLACE-TORCH: run benchmarks/peers.py laplace once, which makes an environment for it.")
    peers = importlib.import_module("peers")
    monkeypatch.setattr(peers.record, "write", lambda name, result: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "laplace"])
    assert peers.main() == 0, capsys.readouterr().out
