"""The comparison that the other tests use."""

import numpy as np
import pytest
import torch

from tests.closeness import assert_close


def test_errors_are_measured_by_the_largest_value():
    expected = torch.tensor([100.0, 1e-3, 0.0])
    assert_close(expected + 9e-4, expected)
    assert_close((expected + 9e-3).numpy(), expected.tolist(), "difference")
    assert_close([torch.inf, torch.nan, 1.0], [torch.inf, torch.nan, 1.0 + 1e-13], "float64")
    assert_close(2e-6, 1e-6, scale=1.0)
    assert_close({"a": [1.0]}, {"a": np.array([1.0])})
    assert_close(torch.empty(0), [])


@pytest.mark.parametrize(
    ("value", "expected", "kind", "message"),
    [
        ([[0.0, 100.0], [2e-3, 0.0]], [[0.0, 100.0], [0.0, 0.0]], "float32", r"value\[1, 0\].*error of 0\.002.*1 of 4"),
        (1 + 2e-10, 1.0, "float64", r"value: expected 1, got 1"),
        (torch.nan, 1.0, "float32", "got nan"),
        (1.0, torch.inf, "float32", "expected inf, got 1"),
        (1e-30, 0.0, "float32", "more than 0"),
        ([1.0], [1.0, 1.0], "float32", "shape"),
        ({"a": 1.0}, {"b": 1.0}, "float32", "keys"),
        ({"a": 2.0}, {"a": 1.0}, "float32", r"value\['a'\]"),
    ],
)
def test_what_differs_is_named(value, expected, kind, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(value, expected, kind)
