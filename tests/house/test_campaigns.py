"""The long campaigns, in short: a few random calls against the closed form, and a few kills. `make fuzz` and `make crash` do many."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("fuzz")


def run(script, *options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "benchmarks" / f"{script}.py", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_random_calls_say_what_the_closed_form_says():
    done = run("fuzz", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(n) for n, name in re.findall(r"(\d+) ([a-z ]+)", done.stdout.splitlines()[-1].split(": ")[1])}
    assert counts["right"] > 90, "most calls must be compared, and not refused or unsettled"
    assert counts["refused rightly"] > 15


@pytest.mark.filterwarnings("ignore::mola.MolaWarning")
def test_every_kind_of_hostile_call_is_refused(fuzz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for index, name in enumerate(fuzz.ATTACKS):
        for turn in range(6):
            scene = fuzz.draw(100 * index + turn, small=True)
            try:
                fuzz.hostile(scene, name)
            except Exception as error:
                pytest.fail(f"{name}, {scene.told}: {type(error).__name__}: {error}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are those of a forked process")
def test_killed_work_is_neither_lost_nor_half_done():
    done = run("crash", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills: 0 lost, 0 half-written, 0 differs, 0 leftover" in done.stdout


def test_a_mistake_is_noticed(tmp_path):
    """The closed form does catch a wrong sign: else the campaign would prove nothing."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "import mola.links, math\n"
        "mola.links._cool = lambda mean, variance: mean * (1 + math.pi / 16 * variance).rsqrt()\n"
        "import fuzz\n"
        "sys.exit(fuzz.main())\n"
    )
    done = subprocess.run(
        [sys.executable, script, "--calls", "40", "--quick"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 1
    assert re.search(r"FAILED \w+: wrong: probs.*\n  python benchmarks/fuzz.py --case \d+", done.stdout), done.stdout
