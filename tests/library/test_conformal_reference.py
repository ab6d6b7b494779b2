"""Sets are those of MAPIE and TorchCP where definitions agree: what they gave is kept in conformal_reference.json.

`benchmarks/peers.py conformal` compares many more with the libraries themselves; `peers.py --frozen` prints the file.
"""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

import molaplace as mola

REFERENCE = json.loads((Path(__file__).parent / "conformal_reference.json").read_text(encoding="utf-8"))
OURS = {
    "TorchCP lac": {"method": "lac"},
    "TorchCP aps": {"method": "aps"},
    "TorchCP raps": {"method": "raps", "penalty": 0.05, "free": 1},
    "TorchCP lac by class": {"method": "lac", "by": "class"},
    "MAPIE lac": {"method": "lac"},
    "MAPIE aps randomised": {"method": "aps", "randomised": True},
}


@pytest.mark.parametrize("name", OURS)
def test_sets_are_those_of_other_libraries(name):
    probs, new = (torch.tensor(REFERENCE[key], dtype=torch.float64) for key in ("probs", "new"))
    # MAPIE subtracts its random part of the last class, we add ours.
    draws = [1 - torch.tensor(numbers, dtype=torch.float64) for numbers in REFERENCE["uniform"]]
    with mock.patch("torch.rand", side_effect=lambda *shape, **_: draws.pop(0).reshape(shape)):
        sets = mola.prediction_sets(probs, REFERENCE["labels"], REFERENCE["coverage"], **OURS[name])
        held = sets(new)
    assert ["".join("01"[one] for one in row) for row in held.int().tolist()] == REFERENCE["sets"][name]
    assert set(OURS) == set(REFERENCE["sets"])
