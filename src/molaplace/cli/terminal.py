"""What every command shows: its progress, inputs that were left out, and the summary as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import joblib
import torch
from rich.console import Console
from tqdm import tqdm

from molaplace.data.dataset import SkippedInputs
from molaplace.distributed import Team
from molaplace.progress import Progress, no_progress

LEFT_OUT = 3
"""Exit code of a command that succeeded but left some inputs out."""

CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which users, and torchrun, choose the number of threads themselves."""


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is."""
    return Console(stderr=stderr, highlight=False)


def limit_threads(most: int | None = None) -> None:
    """Use at most this number of threads, by default one for each processor that a container grants, unless the environment sets it.

    PyTorch starts one for each processor of the machine; where a container grants a few, they wait for each other.
    """
    if not any(name in os.environ for name in CHOICES):
        torch.set_num_threads(min(torch.get_num_threads(), most or joblib.cpu_count()))


@contextmanager
def showing_progress(*, quiet: bool) -> Iterator[Progress]:
    """Yield a function that shows the current step and the share of the work completed, from 0 to 1, on stderr.

    In a terminal, the progress is a bar, otherwise a line for each step. For steps that differ only in their numbers, such as epochs, at
    most one line is printed per tenth of the work.
    """
    limit_threads()
    if quiet:
        yield no_progress
    elif sys.stderr.isatty():
        with tqdm(total=1.0, bar_format="{desc:<32} {bar:32} {elapsed}", leave=False) as bar:

            def draw(doing: str, done: float) -> None:
                bar.set_description_str(doing, refresh=False)
                bar.update(done - bar.n)

            yield draw
    else:
        printed = ("", -1)

        def show(doing: str, done: float) -> None:
            nonlocal printed
            line = (re.sub(r"\d+", "", doing), int(10 * done))
            if doing != printed[0] and (line[0], line[1]) != (re.sub(r"\d+", "", printed[0]), printed[1]):
                sys.stderr.write(f"{round(100 * done):3d} % {doing}\n")
                printed = (doing, line[1])

        yield show


def finish(skipped: SkippedInputs, summary: dict[str, Any], team: Team, *, as_json: bool, quiet: bool) -> int:
    """Report inputs that were left out, or print the summary as JSON. Return the exit code, which is 3 if inputs were left out.

    With several processes, the exit code is 0 even then, because torchrun treats any other exit code as a failure.
    """
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    elif not quiet:
        for line in skipped.lines():
            console(stderr=True).print(line, soft_wrap=True, markup=False)
    return LEFT_OUT if len(skipped) and team.size == 1 else 0
