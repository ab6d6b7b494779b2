"""`mola fit`: a posterior from the user's own networks and data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.app.cli.shared_options import (
    RUN,
    Json,
    Quiet,
    a_price,
    finish,
    numbers,
    scaling_words,
    set_threads,
    sides,
    texts,
)
from mola.compare.report.tables import Column, for_terminal, make_table
from mola.options import counted

if TYPE_CHECKING:
    from mola.app.jobs.fit import FitResult
    from mola.app.jobs.job import Job

NETWORKS, DATA, PREPARATION, METHOD = "Networks", "Data", "Preparation of the inputs", "Method"

CODE = ("network", "train", "val", "outliers")
"""Options that may name functions."""


def fit(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="WEIGHTS", help="Files of weights, as for --weights.")
    ] = None,
    network: Annotated[
        list[str] | None,
        typer.Option(
            help="lenet, resnet-20, wrn-16-4, ...; package.module:function; timm:NAME; a Hugging Face folder; a .pt2 file. Can "
            "be repeated.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Files of weights (safetensors, or saved by torch.save), or a folder of them; each makes one network.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Class names in the order of the outputs, separated by commas or one per line in a file; or the number of "
            "classes.  [default: the names of the subfolders]",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Dotted name of the last linear layer.  [default: found automatically]", rich_help_panel=NETWORKS
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Read .pt2 files, which can run code.", rich_help_panel=NETWORKS)
    ] = False,
    train: Annotated[
        str | None,
        typer.Option(
            help="Training data: a folder of images with a subfolder for each class, .npz (x, y), .csv (path, label), mnist:train, or "
            "package.module:function.",
            rich_help_panel=DATA,
        ),
    ] = None,
    val: Annotated[str | None, typer.Option(help="Validation data, in the same forms.", rich_help_panel=DATA)] = None,
    outliers: Annotated[
        str | None, typer.Option(help="Data that belong to no class, for --rule outliers.", rich_help_panel=DATA)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(envvar="MOLA_DATA", help="Folder that holds the built-in data sets.", rich_help_panel=DATA),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch built-in sets that are missing.", rich_help_panel=DATA)
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first input that cannot be used.", rich_help_panel=DATA)
    ] = False,
    resize: Annotated[
        str | None,
        typer.Option(
            help="Resize images: the shorter side (256), or height and width (32x32).", rich_help_panel=PREPARATION
        ),
    ] = None,
    crop: Annotated[
        int | None,
        typer.Option(min=1, help="Then crop a square of this side from the middle.", rich_help_panel=PREPARATION),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="RGB, or L for grey.  [default: as the images are]", rich_help_panel=PREPARATION)
    ] = None,
    normalise: Annotated[
        str | None,
        typer.Option(
            help="Normalisation of pixels: none (x / 255), cifar10 or imagenet.  [default: the network's own, or none]",
            rich_help_panel=PREPARATION,
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Mean of the pixels instead of --normalise: 0.5 or 0.49,0.48,0.45.", rich_help_panel=PREPARATION
        ),
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Standard deviation of the pixels, with --mean.", rich_help_panel=PREPARATION)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Inputs in a batch.  [default: 256]", rich_help_panel=PREPARATION)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Threads that decode images.  [default: 2]", rich_help_panel=PREPARATION)
    ] = None,
    likelihood: Annotated[
        str | None,
        typer.Option(
            help="What the networks' outputs mean: categorical (one of C classes), bernoulli (yes or no for each output) or "
            "gaussian (numbers).  [default: categorical]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help="Of numbers: standard deviation of the targets' noise, one or one for each output.  [default: chosen]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    location: Annotated[
        str | None,
        typer.Option(
            help="Of numbers: the mean that was taken from the targets in training.  [default: 0]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Of numbers: the standard deviation that they were divided by.  [default: 1]", rich_help_panel=METHOD
        ),
    ] = None,
    heteroscedastic: Annotated[
        bool,
        typer.Option(
            "--heteroscedastic",
            help="Of numbers: the networks say the log variance of each target, too, after all means.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    structure: Annotated[
        str | None,
        typer.Option(
            help="Structure of the curvature: kron, kron-exact, kron-diag, diag or full.  [default: kron]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="How to choose the prior precision lambda: threshold (the paper's), nll, brier, ece, evidence, "
            "outliers or none; distance also cools logits far from the training data; of numbers nll, crps, evidence, distance or "
            "none.  [default: threshold; of numbers nll]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Smallest mean confidence, for --rule threshold.  [default: 0.01 below the networks' mean accuracy]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="What caution may cost, for --rule distance: 0.02 is at most 2 % more log loss on the validation data, loss no "
            "more than by the paper's rule.  [default: mean confidence at the paper's threshold]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            help="Of networks with outputs at every pixel or token, what counts as a datum: all positions, average (each input counts "
            "once), or a number of positions drawn from each input.  [default: all]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    ignore_index: Annotated[
        int | None,
        typer.Option(
            help="Label of positions that are left out.  [default: -100]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    no_distances: Annotated[
        bool,
        typer.Option(
            "--no-distances",
            help="Keep no class means of the training data, which distances need: C x P numbers for each network.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    prior_precision: Annotated[
        float | None,
        typer.Option(help="The prior precision lambda, for --rule none.  [default: 1]", rich_help_panel=METHOD),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="From logits to probabilities: probit, probit-centred, mean-field, bridge or mc.  [default: probit]",
            rich_help_panel=METHOD,
        ),
    ] = None,
    mixing: Annotated[
        str | None,
        typer.Option(
            help="Weights of the networks: uniform, evidence or stacking.  [default: uniform]", rich_help_panel=METHOD
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the posterior.", rich_help_panel=RUN)] = Path("posterior"),
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle", help="Copy the weights into the folder, so that it can be moved.", rich_help_panel=RUN
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Options from a TOML file, such as the job.toml of a posterior; flags take precedence.",
            rich_help_panel=RUN,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of everything random.  [default: 0]", rich_help_panel=RUN)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to run the networks.  [default: cpu]", rich_help_panel=RUN)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with.  [default: torch's]", rich_help_panel=RUN)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder for the state of the fit; the same command resumes from it.", rich_help_panel=RUN),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give trained networks honest confidence: one pass over the training data.

    Reads each network's weights, puts a Laplace approximation on its last layer, tunes one number on the validation data and
    writes a folder that the other commands open. Networks are neither retrained nor changed.

        mola fit checkpoints/*.safetensors --network lenet --train mnist:train --val mnist:val --data DIR

        mola fit a.pt b.pt --network models:build --train images/train --val images/val --normalise imagenet

    Several processes share the work, here or on many machines: torchrun --nproc-per-node=4 -m mola fit ...
    """
    from mola.app.jobs.code import check_values
    from mola.app.jobs.fit import run_fit
    from mola.app.jobs.job import Job, read_job
    from mola.distributed import join

    job = Job() if config is None else read_job(config)[0]
    given: dict[str, Any] = {
        "network": tuple(network) if network else None,
        "weights": (*(weights or ()), *(files or ())) or None,
        "classes": texts(classes),
        "head": head,
        "trust": trust or None,
        "train": train,
        "val": val,
        "outliers": outliers,
        "directory": None if data is None else str(data),
        "download": download or None,
        "strict": strict or None,
        "resize": sides(resize),
        "crop": crop,
        "mode": mode,
        "normalise": normalise,
        "mean": numbers(mean, "--mean"),
        "std": numbers(std, "--std"),
        "batch_size": batch_size,
        "workers": workers,
        "likelihood": likelihood,
        "noise": numbers(noise, "--noise"),
        "location": numbers(location, "--location"),
        "scale": numbers(scale, "--scale"),
        "heteroscedastic": heteroscedastic or None,
        "structure": structure,
        "link": link,
        "mixing": mixing,
        "prior_precision": prior_precision,
        "rule": rule,
        "threshold": threshold,
        "price": a_price(price),
        "distances": False if no_distances else None,
        "positions": positions,
        "ignore_index": ignore_index,
        "seed": seed,
        "device": device,
        "threads": threads,
    }
    if config is not None:
        by_file = {f"--{name}": getattr(job, name) for name in CODE if given[name] is None}
        check_values(by_file, config, trust=trust)
    if likelihood == "gaussian" and rule is None and config is None:
        given["rule"] = "nll"  # numbers have no confidence that could meet a threshold
    job = job.with_options(given)
    set_threads(job.threads)
    with join() as team:
        # One process writes and speaks for all.
        quiet, as_json = quiet or not team.first, as_json and team.first
        with showing_progress(quiet=quiet) as progress, _hearing() as heard:
            result = run_fit(job, output, progress, bundle=bundle, team=team, checkpoint=checkpoint)
    if not quiet and not as_json:
        _show(output, job, result, heard)
    summary = {
        "folder": str(output),
        "result": result.document["result"],
        "notes": list(result.notes),
        "replaced": result.replaced,
        **result.account.plain(),
    }
    # torchrun knows only success and failure: what was left out is said, but does not end the job.
    with suppress(*(typer.Exit,) if team.size > 1 else ()):
        finish(result.account, summary, as_json=as_json, quiet=quiet)


@contextmanager
def _hearing() -> Iterator[set[str]]:
    heard: set[str] = set()
    show = warnings.showwarning

    def hear(message: Warning | str, *rest: Any) -> None:
        heard.add(str(message))
        show(message, *rest)

    warnings.showwarning = hear  # type: ignore[assignment]
    try:
        yield heard
    finally:
        warnings.showwarning = show


def _show(output: Path, job: Job, result: FitResult, heard: set[str]) -> None:
    console = Console(highlight=False)
    found = result.document["result"]
    networks = len(found["prior_precision"])
    count = counted(networks, "network")
    precisions = ", ".join(dict.fromkeys(f"{value:.3g}" for value in found["prior_precision"]))
    rule = f", by {found['rule']}" if found["rule"] else ""
    cooled = "".join(f", {words}" for words in scaling_words(found))
    outputs = f"{found['outputs']} classes" if job.likelihood == "categorical" else counted(found["outputs"], "output")
    if job.heteroscedastic:
        outputs += f", means and variances of {counted(found['outputs'] // 2, 'target')},"
    part = "position" if found["has_positions"] else "input"
    datum = "input" if job.positions == "average" else part
    console.print(
        f"Fitted {count} with {outputs} on {counted(found['train_count'], datum)}: structure {job.structure}, lambda "
        f"{precisions}{cooled}{escape(rule)}."
    )
    measured = found["validation"]
    if measured:
        plain = "network" if networks == 1 else "ensemble"  # of the same networks, without covariances
        shown = [("accuracy", "accuracy %", 100, 2), ("nll", "NLL", 1, 4), ("ece", "ECE %", 100, 2)]
        shown += [("confidence", "mean conf. %", 100, 2)]
        if job.likelihood == "gaussian":
            shown = [("rmse", "RMSE", 1, 4), ("nll", "NLL", 1, 4), ("crps", "CRPS", 1, 4), ("std", "mean std.", 1, 4)]
            shown += [("coverage", "in 90 % intervals %", 100, 1)]
        columns = [Column(heading, digits=digits) for _, heading, _, digits in shown]
        values = {
            name: [times * one[key] for key, _, times, _ in shown]
            for name, one in ((plain, measured["networks"]), ("posterior", measured["posterior"]))
        }
        caption = f"{counted(measured['count'], part)}, which were tuned on: `mola evaluate` measures on others."
        console.print(for_terminal(make_table("On the validation data", caption, columns, values)))
        before, after = measured["networks"]["nll"], measured["posterior"]["nll"]
        if after > before and str(found["rule"]).startswith("Threshold"):
            console.print(
                f"The threshold rule has raised the log loss here, {before:.4f} to {after:.4f}: that is the price of caution outside "
                f"these data. --rule nll tunes for the log loss instead.",
                style="dim",
            )
    for note in result.notes:
        if note not in heard:
            console.print(f"Note: {escape(note)}", style="dim")
    place = escape(str(output))
    instead = ", and replaced the posterior that was there" if result.replaced else ""
    console.print(
        f"Wrote [bold]{place}[/bold]{instead}. Next: mola predict {place} DATA --output predictions.csv", soft_wrap=True
    )
