"""Start Python with torch already loaded: loading it takes most of the time of a test that starts a process.

A fork server of `multiprocessing`, one for each test worker, has loaded only torch. Each process is a fork of it with its
own folder, environment, arguments and streams; it imports `molaplace` itself and ends with an exit code or a signal. Tests of
interpreter options, or of variables that torch reads on import, need a real process: `subprocess`.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])


def start_python(
    arguments: Sequence[str | Path],
    *,
    stdout: str | Path = os.devnull,
    stderr: str | Path = os.devnull,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> BaseProcess:
    """Start `python` with arguments `-m module ...` or `-c code ...`; folder and environment are those of this process."""
    words = [str(argument) for argument in arguments]
    process = CONTEXT.Process(
        target=_be_python,
        args=(words, str(stdout), str(stderr), str(cwd or Path.cwd()), dict(os.environ if env is None else env)),
    )
    process.start()
    return process


def run_python(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python` with arguments to its end, as `subprocess.run(..., capture_output=True, text=True)` does."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stdout"
        err = Path(folder) / "stderr"
        process = start_python(arguments, stdout=out, stderr=err, cwd=cwd, env=env)
        code = wait_for(process, timeout)
        said = [path.read_text(encoding="utf-8") for path in (out, err)]
    if code is None:
        raise subprocess.TimeoutExpired(list(map(str, arguments)), timeout, *said)
    return subprocess.CompletedProcess(list(map(str, arguments)), code, *said)


def wait_for(process: BaseProcess, timeout: float) -> int | None:
    """Wait for a process to end and return its exit code; kill it and return None after the timeout."""
    process.join(timeout)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def run_team(
    size: int,
    arguments: Sequence[str | Path],
    folder: Path,
    *,
    timeout: float,
    cwd: Path | None = None,
    **environment: str,
) -> tuple[list[int | None], list[str]]:
    """Run several processes as one torchrun job: their exit codes, None for killed processes, and their stderr.

    The folder is for their stderr files; `environment` holds variables added to those of this process.
    """
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **environment}
    said = [folder / f"{rank}-of-{size}.stderr" for rank in range(size)]
    started = [
        start_python(arguments, stderr=path, cwd=cwd, env=os.environ | common | {"RANK": str(rank)})
        for rank, path in enumerate(said)
    ]
    end = time.monotonic() + timeout
    codes = [wait_for(process, max(0.0, end - time.monotonic())) for process in started]
    return codes, [path.read_text(encoding="utf-8") for path in said]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _be_python(arguments: list[str], stdout: str, stderr: str, folder: str, environment: dict[str, str]) -> None:
    """Become `python` with these arguments, in the fork."""
    for number, path in ((1, stdout), (2, stderr)):
        written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(written, number)
        os.close(written)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    sys.stderr = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, what, *rest = arguments
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [folder, *paths]
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = types.ModuleType("__main__")
        main.__builtins__ = builtins
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), vars(main))
