"""What the tests of jobs share: a user's folder with networks and data, and a posterior fitted there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own_work import Desk, fit_at, make_desk


@pytest.fixture(scope="module")
def desk(request, tmp_path_factory) -> Desk:
    """Data, weights and a module that builds the networks, under a name that no other file of tests has imported."""
    return make_desk(tmp_path_factory.mktemp("desk"), f"own_networks_for_{request.module.__name__.rpartition('.')[2]}")


@pytest.fixture
def _at_the_desk(desk, monkeypatch) -> None:
    monkeypatch.chdir(desk.root)
    monkeypatch.syspath_prepend(str(desk.root))


@pytest.fixture(scope="module")
def fitted(desk, tmp_path_factory) -> Path:
    return fit_at(desk, tmp_path_factory.mktemp("fitted") / "posterior")
