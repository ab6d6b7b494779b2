"""`mola train`: the networks of a suite, by the paper's recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress


def train(
    suite: Annotated[str, typer.Argument(help="digits, mnist, cifar10 or clinc.")],
    count: Annotated[int, typer.Option("--networks", min=1, help="How many networks.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Folder for them.  [default: networks/SUITE]")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="MOLA_DATA", help="Folder that holds the data sets; digits need none.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="Architecture.  [default: the paper's]")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs.  [default: the paper's]")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images a step.  [default: the paper's]")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At the start.  [default: the paper's]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[default: the paper's]")] = None,
    train_images: Annotated[int | None, typer.Option(min=1, help="Use at most so many training images.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all the networks' seeds.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train, such as cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compute with.  [default: torch's]")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch missing data sets.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing.")] = False,
) -> None:
    """Train the networks of a suite, each from its own seed.

    A network is kept as NN.safetensors when it is done, and its training under way beside it after every epoch: the same
    command goes on where it stopped, to the same bits.
    """
    import torch

    from mola.distributed import join
    from mola.lab.networks import Training, train_networks
    from mola.lab.suite import DataOptions
    from mola.lab.suites.registry import find_suite

    chosen = find_suite(suite)
    changes = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    recipe = replace(chosen.recipe, **given)  # type: ignore[arg-type]
    if threads is not None:
        torch.set_num_threads(threads)
    options = DataOptions(directory=data, train=train_images, download=download)
    training = Training(chosen, count, recipe, network, seed, options, device)
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        paths = train_networks(training, output or Path("networks") / chosen.name, progress, team)
    if not quiet and team.first:
        Console(highlight=False).print(
            f"Trained networks ({len(paths)}) are in [bold]{escape(str(paths[0].parent))}[/bold]", soft_wrap=True
        )
