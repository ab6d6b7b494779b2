"""`molaplace train`: train the networks of a suite with the paper's recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from molaplace.cli.job import RUN
from molaplace.cli.option_groups import Device, RunOptions
from molaplace.cli.options import check_folder, option
from molaplace.cli.progress import showing_progress
from molaplace.errors import OptionError
from molaplace.options import one_of

RECIPE = "Recipe (the paper's by default)"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions, Device):
    """Options for `molaplace train`."""

    suite: str = option(help="digits, mnist, cifar10 or clinc", argument=True, metavar="SUITE")
    networks: int = option(5, "Number of networks", minimum=1)
    output: Path | None = option(
        None, "Folder for the networks", flags=("--output", "-o"), metavar="DIR", shown="networks/SUITE"
    )
    data: Path | None = option(
        None,
        "Folder that contains the data sets (or set MOLAPLACE_DATA); not needed for digits",
        metavar="DIR",
        envvar="MOLAPLACE_DATA",
    )
    download: bool = option(False, "Download missing data sets")
    network: str | None = option(None, "Architecture", panel=RECIPE, metavar="NAME")
    epochs: int | None = option(None, "Number of epochs", panel=RECIPE, minimum=1)
    batch_size: int | None = option(None, "Inputs per step", panel=RECIPE, minimum=1)
    learning_rate: float | None = option(None, "Initial learning rate", panel=RECIPE)
    weight_decay: float | None = option(None, "Weight decay", panel=RECIPE)
    train_images: int | None = option(None, "Use at most N training inputs", panel=RECIPE, minimum=1)
    seed: int = option(0, "Base seed, from which each network's seed is derived", panel=RUN, minimum=0)


def train(options: TrainOptions) -> None:
    """Train the networks of a suite, each with its own seed.

    Finished networks are saved as NN.safetensors; unfinished networks are saved after every epoch. Running the same command
    again resumes training and gives the same weights as an uninterrupted run.
    """
    from molaplace.distributed import join
    from molaplace_lab.networks import Training, train_networks
    from molaplace_lab.suite import DataOptions
    from molaplace_lab.suites.registry import SUITES, find_suite

    if options.suite not in SUITES:
        one_of(options.suite, [name for name, one in SUITES.items() if one.training_data is not None], "suite")
    suite = find_suite(options.suite)
    output = options.output or Path("networks") / suite.name
    check_folder(output)
    found = sorted(path.name for path in output.glob("[!.]*"))
    if found and not any(re.fullmatch(r"\d+\.(safetensors|training)", name) for name in found):
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise OptionError(f"{output} contains other files ({shown}) but no networks. Choose another --output.")
    names = ("epochs", "batch_size", "learning_rate", "weight_decay")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    data = DataOptions(directory=options.data, train=options.train_images, download=options.download)
    recipe = replace(suite.recipe, **given)
    training = Training(suite, options.networks, recipe, options.network, options.seed, data, options.device)
    with join() as team, showing_progress(quiet=options.quiet or not team.first) as progress:
        paths = train_networks(training, output, progress, team)
    if not options.quiet and team.first:
        Console(highlight=False).print(
            f"The trained networks ({len(paths)}) are in [bold]{escape(str(paths[0].parent))}[/bold].", soft_wrap=True
        )
