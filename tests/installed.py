"""Test the wheel as users get it: build it, compare it with the sources, install it into an empty environment, use it.

    make test-wheel

The clone is not on the path. First without extras: the package imports and fits, and commands name the extra they need. Then with
`cli`: snippets of README and docs, and the commands of README. Then with `export`: `molaplace export`. Then with `transformers`: the
notebooks of the gallery. The laboratory is not in the wheel. Needs the package index, and takes a few minutes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from build import ProjectBuilder
from build.env import DefaultIsolatedEnv

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "cli"
BARE = {"torch", "numpy", "safetensors", "tqdm", "jinja2", "filelock"}
"""Allowed dependencies without extras."""

SNIPPET = re.compile(r"<!-- setup[^\n]*\n(.*?)-->|^```python\n(.*?)^```", re.M | re.S)
IS_WHOLE = """
import importlib.metadata, importlib.util, pathlib, sys

import molaplace as mola

assert pathlib.Path(mola.__file__).is_relative_to(sys.prefix), mola.__file__
assert mola.__version__ == importlib.metadata.version("molaplace")
assert importlib.util.find_spec('molaplace_lab') is None
for name in dir(mola):
    try:
        getattr(mola, name)
    except mola.errors.MissingExtraError as error:
        assert "pip install" in str(error), name
"""
"""Check that this is the installed package, and that every public name exists or names its extra."""


def say(words: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {words}", flush=True)


NOT_OURS = {"PYTHONPATH", "VIRTUAL_ENV", "MOLAPLACE_DATA", "PYTHONDONTWRITEBYTECODE"}
"""Variables of another environment. With the last, every command would compile torch again."""


def run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command outside the current environment, and check its exit code."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        shown = " ".join(str(word) for word in command)
        sys.exit(f"{shown}\nended with {done.returncode}, expected {code}:\n{done.stdout}{done.stderr}")
    return done


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(otherwise)


def tracked() -> dict[str, bytes]:
    """Every file of the package that git tracks: the exact contents of the wheel."""
    listed = run("git", "ls-files", "-z", "--", "src/molaplace", cwd=ROOT).stdout.split("\0")
    paths = [Path(line) for line in listed if line]
    return {path.relative_to("src").as_posix(): (ROOT / path).read_bytes() for path in paths if (ROOT / path).exists()}


def packed(wheel: Path) -> dict[str, bytes]:
    """Every file of the package in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("molaplace/")}


def build(folder: Path) -> Path:
    """Build a wheel from the sources and from the source distribution; both must contain the package and nothing else."""
    with DefaultIsolatedEnv() as tools:  # build requirements of pyproject.toml only
        builder = ProjectBuilder.from_isolated_env(tools, ROOT)
        tools.install(builder.build_system_requires)
        for kind in ("wheel", "sdist"):
            tools.install(builder.get_requires_for_build(kind))
        wheels = {"direct": builder.build("wheel", folder / "direct")}
        with tarfile.open(builder.build("sdist", folder / "sdist")) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        wheels["by-sdist"] = ProjectBuilder.from_isolated_env(tools, unpacked).build("wheel", folder / "by-sdist")
    expected = tracked()
    for source, wheel in wheels.items():
        found = packed(Path(wheel))
        missing, strange = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        changed = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
        check(
            not missing and not strange and not changed,
            f"the wheel ({source}) and the files that git tracks under src/molaplace differ.\n"
            f"Missing from the wheel: {missing}\nIn the wheel alone: {strange}\nOf other contents: {changed}",
        )
        say(f"built ({source}): {len(found)} files, as in the sources")
    return Path(wheels["direct"])


def check_readme(wheel: Path) -> None:
    """README on the package index has no relative links or images, which would lead nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        readme = archive.read(metadata).decode().split("\n# molaplace\n")[1]
    relative = re.findall(r"\]\((?!https?://)[^)]*\)", readme)
    check(not relative, f"README on the package index has relative links: {relative}")


class Environment:
    """A fresh virtual environment, and an empty working directory."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
        self.desk = folder / "desk"
        self.desk.mkdir()
        run(sys.executable, "-m", "venv", folder / "environment", cwd=folder)

    def install(self, what: str) -> None:
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
        run(self.bin / "python", *pip, "--constraint", ROOT / "constraints.txt", what, cwd=self.desk)

    def python(self, code: str) -> str:
        return run(self.bin / "python", "-c", code, cwd=self.desk).stdout

    def molaplace(self, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        started = time.perf_counter()
        done = run(self.bin / "molaplace", *words, cwd=self.desk, code=code)
        say(f"molaplace {' '.join(map(str, words))}   ({time.perf_counter() - started:.1f} s)")
        return done


SECTIONS = (("README.md", "Use it from Python"), ("docs/default.md", "Set an option"))
"""Sections whose snippets need no extras."""


def snippets() -> str:
    """Return the snippets of these sections with their setup code."""
    code = ["import torch"]
    for page, title in SECTIONS:
        section = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
        found = [setup or shown for setup, shown in SNIPPET.findall(section)]
        check(bool(found), f"{page}: the section {title!r} has no snippet.")
        code += found
    return "\n".join(code)


def try_bare(environment: Environment) -> None:
    """Without extras: check the dependencies, run the snippets, and check that a command names its extra."""
    wanted = (
        "import importlib.metadata as m, re; "
        "print(*sorted(re.match(r'[\\w-]+', r)[0] for r in m.requires('molaplace') if 'extra ==' not in r))"
    )
    needed = set(environment.python(wanted).split())
    check(needed == BARE, f"the package without extras needs {sorted(needed)}, expected {sorted(BARE)}.")
    environment.python(IS_WHOLE)
    environment.python(snippets())
    told = environment.molaplace("info", "posterior", code=1).stderr
    check("molaplace[cli]" in told and "Traceback" not in told, f"a command without its extra says: {told}")


def try_commands(environment: Environment) -> None:
    """With the extras: run the snippets and each command, and check the output."""
    environment.python(IS_WHOLE + snippets())
    molaplace, desk = environment.molaplace, environment.desk
    check("evaluate" in molaplace("--help").stdout, "the help lists no commands")
    molaplace("demo", "--quiet")
    check("MoLA" in (desk / "demo-results" / "index.html").read_text(encoding="utf-8"), "the demo's page lacks MoLA")

    networks = Path("demo-results", "networks")
    fitted = molaplace(
        "fit", networks, "--network", "mlp", "--train", "digits:train", "--val", "digits:val", "--json"
    ).stdout
    check(isinstance(json.loads(fitted), dict), f"`molaplace fit --json` printed {fitted}")
    environment.python(
        "import numpy as n; n.savez('noise.npz', x=n.random.default_rng(0).random((200, 1, 8, 8), 'float32'))"
    )
    molaplace("evaluate", "posterior", "--test", "digits:test", "--ood", "noise.npz", "--output", "evaluation")
    numbers = json.loads((desk / "evaluation" / "numbers.json").read_text(encoding="utf-8"))
    accuracy = numbers["methods"]["MoLA"]["labelled"]["digits:test"]["metrics"]["accuracy"]
    check(accuracy > 0.9, f"MoLA's accuracy on digits is {accuracy}")
    page = (desk / "evaluation" / "index.html").read_text(encoding="utf-8")
    check("noise" in page and "<style>" in page, "the evaluation's page lacks the outliers or its style")
    molaplace("predict", "posterior", "digits:test", "--output", "predictions.csv")
    with (desk / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    right = {row["name"] for row in rows if not row["error"] and 0 < float(row["confidence"]) <= 1}
    check(len(rows) > 100 and len(right) == len(rows), f"of {len(rows)} rows, {len(right)} hold a prediction")
    watched = molaplace("watch", "posterior", "digits:test", "--log", "watch.jsonl").stdout
    check((desk / "watch.html").exists() and "accuracy" in watched, f"`molaplace watch` says: {watched}")
    molaplace("watch", "posterior", "noise.npz", "--log", "watch.jsonl", code=3)
    check("kron" in molaplace("info", "posterior").stdout, "`molaplace info` does not name the structure")
    message = molaplace("export", "posterior", "--onnx", "digits.onnx", code=1).stderr
    check("molaplace[export]" in message, f"a command without its extra says: {message}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="molaplace-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        check_readme(wheel)
        environment = Environment(folder)
        environment.install(str(wheel))
        say("installed without extras")
        try_bare(environment)
        say("without extras: imports, fits, predicts, saves")
        # Reuse the environment: torch takes longest to install.
        for left in environment.desk.iterdir():
            left.rename(folder / f"bare-{left.name}")
        environment.install(f"{wheel}[{EXTRAS}]")
        say(f"installed with [{EXTRAS}]")
        try_commands(environment)
        environment.install(f"{wheel}[{EXTRAS},export]")
        environment.molaplace("export", "posterior", "--onnx", "digits.onnx")
        check((environment.desk / "digits.onnx").exists(), "`molaplace export` wrote no file")
        environment.install(f"{wheel}[{EXTRAS},transformers]")
        run(environment.bin / "python", ROOT / "docs" / "gallery" / "run.py", "--check", cwd=environment.desk)
        say("the notebooks of the gallery run")
        say("done: the wheel holds what its users need")


STARTED = time.perf_counter()
if __name__ == "__main__":
    main()
