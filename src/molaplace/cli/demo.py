"""`molaplace demo`: fit and tune posteriors on data bundled with scikit-learn, and compare methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from molaplace.cli.evaluate import print_summary
from molaplace.cli.options import FolderOptions, check_writable, option
from molaplace.cli.terminal import showing_progress
from molaplace.demo.run import DEMO, DemoSettings, run_demo, write_demo
from molaplace.progress import part
from molaplace.report.writing import PAGE
from molaplace.saving.files import check_folder

FIGURES_BEGIN = 0.85
"""Measured fraction of the total time that passes before the figures are drawn."""

LARGEST_SEED = 2**31 - 1
"""Largest seed allowed."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(FolderOptions):
    """Options for `molaplace demo`."""

    output: Path = option(
        Path("demo-results"), "Folder for the page, the figures and the numbers", flags=("--output", "-o")
    )
    seed: int = option(0, "Random seed for the split, the networks and the noise", minimum=0, maximum=LARGEST_SEED)
    quiet: bool = option(False, "Print nothing", stored=False)


def demo(options: DemoOptions) -> None:
    """Compare single networks, deep ensembles and MoLA (with the paper's and the default rule) on handwritten digits.

    Trains five small networks on data bundled with scikit-learn, fits and tunes posteriors, and compares the methods on test
    data, rotated digits and OOD inputs. Writes a web page with tables and figures, and the networks.
    """
    output = options.output
    quiet = options.quiet
    check_writable(output)
    check_folder(output, DEMO, (PAGE,), overwrite=options.overwrite)
    with showing_progress(quiet=quiet) as progress:
        result = run_demo(DemoSettings(seed=options.seed), part(progress, 0.0, FIGURES_BEGIN))
        page = write_demo(result, output, part(progress, FIGURES_BEGIN, 1.0), overwrite=True)  # as checked above
    if not quiet:
        print_summary(result.evaluation, page)
