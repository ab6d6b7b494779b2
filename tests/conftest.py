"""Problems and fixtures shared by all tests: float64 throughout, every seed explicit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Test problems are tiny and workers run in parallel: one thread. Read on import by numpy and torch, also in child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from filelock import FileLock  # comes with torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from tests import closeness

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_configure(config: pytest.Config) -> None:
    """Draw the same few hypothesis examples in every run, unless `--hypothesis-seed` is given; `benchmarks/fuzz.py` draws many."""
    settings.register_profile(
        "tests",
        derandomize=config.getoption("hypothesis_seed", None) is None,
        deadline=None,
        max_examples=25,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("tests")


SHARED = Path(os.environ.get("MOLAPLACE_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
"""Folder of real data sets and networks."""


LONGEST = (
    "lab/test_real_data.py",
    "house/test_examples.py",
    "library/test_export.py",
    "library/test_distributed.py",
    "library/test_team.py",
    "library/test_sklearn.py",
    "cli/test_hub_models.py",
    "house/test_explorer.py",
    "lab/test_results.py",
    "house/test_docs.py",
    "evaluation/test_demo.py",
    "house/test_gallery.py",
    "cli/test_export_command.py",
    "library/test_dense.py",
)
"""Slowest test files, run first so that no worker is left with a long file at the end."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests and sort the longest files first.

    Tests on real data are slow: unpacking takes longer than most tests. Files that use `tests/closeness.py` are numerical, and files
    named `test_export*` need the extra `export`.
    """
    for item in items:
        if item.path.name.startswith("test_export"):
            item.add_marker("export")
        if item.get_closest_marker("export") and find_spec("onnx") is None:
            item.add_marker(pytest.mark.skip(reason="NO ONNX: `make setup` installs it"))
        if item.get_closest_marker("real_data"):
            item.add_marker("slow")
        if getattr(getattr(item, "module", None), "assert_close", None) is closeness.assert_close:
            item.add_marker("numerical")
    ranks = {path: rank for rank, path in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.relative_to(Path(__file__).parent).as_posix(), len(ranks)))


def pytest_collection_finish() -> None:
    """Exclude loaded modules from garbage collection, which would take 5 % of the time."""
    gc.collect()
    gc.freeze()


def require_shared(name: str) -> Path:
    """Return a file or folder of the real data; if it is missing, skip the test with a message, or fail in CI.

    Where there are no real data, as on a public host, CI sets MOLAPLACE_TEST_DATA to "none" and skips these tests too.
    """
    if not (SHARED / name).exists():
        message = f"NO REAL DATA at {SHARED}: set MOLAPLACE_TEST_DATA to the folder that holds {name}."
        if os.environ.get("CI") and SHARED.name != "none":
            pytest.fail(message)
        pytest.skip(message)
    return SHARED / name


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory) -> Path:
    """Folder of the real data in their standard files, unpacked once for all workers."""
    script = require_shared("unpack.py")
    common = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        common = common.parent
    with FileLock(common / "unpacked.lock"):  # existing files are kept
        subprocess.run([sys.executable, script, common / "unpacked"], check=True)
    return common / "unpacked"


STRUCTURES = ("kron", "kron-exact", "kron-diag", "diag", "full")
CLOSED_FORM_LINKS = ("probit", "probit-centred", "mean-field", "bridge")


@dataclass
class Problem:
    """A small network and its data, as the dense references need them."""

    network: nn.Module
    inputs: Tensor
    labels: Tensor
    bias: bool

    @property
    def loader(self) -> list[tuple[Tensor, Tensor]]:
        return self.batches(7)

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(size), self.labels.split(size), strict=True))

    def features(self, inputs: Tensor | None = None) -> Tensor:
        """Inputs of the head, with the constant 1 for a bias."""
        with torch.no_grad():
            values = self.network[:-1](self.inputs if inputs is None else inputs)
        return torch.cat([values, torch.ones(len(values), 1)], dim=1) if self.bias else values

    @property
    def weights(self) -> Tensor:
        head = self.network[-1]
        if not self.bias:
            return head.weight.detach()
        return torch.cat([head.weight.detach(), head.bias.detach()[:, None]], dim=1)


def make_problem(seed: int = 0, classes: int = 4, width: int = 6, count: int = 40, bias: bool = True) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, classes, bias=bias))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = torch.randn(count, 3, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return Problem(network, inputs, labels, bias)


@pytest.fixture
def _blank_figures(monkeypatch) -> None:
    """Leave the figures of reports empty. Tests of reports and of the demo draw them."""
    from molaplace.report import style, writing

    monkeypatch.setattr(writing, "render", lambda name, _: style.Drawn(name, "", "", "<svg ></svg>\n", b""))


@pytest.fixture(autouse=True)
def _float64_and_own_random_state():
    """Run every test in float64, and restore the random state afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(before)


@pytest.fixture(params=[True, False], ids=["bias", "no-bias"])
def problem(request) -> Problem:
    return make_problem(bias=request.param)


@pytest.fixture(params=STRUCTURES)
def structure(request) -> str:
    return request.param
