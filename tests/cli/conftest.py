"""What the tests of jobs share: a user's folder with networks and data, and a posterior fitted there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from molaplace.__main__ import main
from tests.cli.fitted_folders import FittedFolder, make_folder
from tests.workspace import Workspace, fit_at, make_workspace


@pytest.fixture(scope="module")
def workspace(request, tmp_path_factory) -> Workspace:
    """Data, weights and a module that builds the networks, under a name that no other file of tests has imported."""
    return make_workspace(
        tmp_path_factory.mktemp("workspace"), f"own_networks_for_{request.module.__name__.rpartition('.')[2]}"
    )


@pytest.fixture
def _in_workspace(workspace, monkeypatch) -> None:
    monkeypatch.chdir(workspace.root)
    monkeypatch.syspath_prepend(str(workspace.root))


@pytest.fixture(scope="module")
def fitted(workspace, tmp_path_factory) -> Path:
    return fit_at(workspace, tmp_path_factory.mktemp("fitted") / "posterior")


@pytest.fixture
def mola_command(monkeypatch, capsys):
    """Run the command as a shell would: exit code, stdout and stderr."""

    def run(*arguments, trust=True):
        # The functions that a posterior's folder names are the tests' own.
        words = ["--trust"] if trust and arguments[0] in ("predict", "evaluate", "export") else []
        monkeypatch.setattr("sys.argv", ["molaplace", *map(str, arguments), *words])
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as stop:
            main()
        signal.signal(signal.SIGTERM, handler)
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def made_folders(tmp_path_factory) -> dict[str, FittedFolder]:
    return {}


@pytest.fixture
def kind(request, made_folders, tmp_path_factory, monkeypatch) -> FittedFolder:
    """The kind of outputs that a test names by `indirect`, fitted once, with its folder as the current one."""
    name: str = request.param
    torch.set_default_dtype(torch.float32)  # put back after each test
    if name not in made_folders:
        made_folders[name] = make_folder(name, tmp_path_factory.mktemp(name))
    folder = made_folders[name]
    monkeypatch.chdir(folder.root)
    monkeypatch.syspath_prepend(str(folder.root))
    if not folder.posterior.exists():
        folder.fit()
    return folder
