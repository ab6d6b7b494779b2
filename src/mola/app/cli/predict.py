"""`mola predict`: a row for each input."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from mola.app.cli.progress import showing_progress
from mola.app.cli.run_file import Config, check_run, write_run
from mola.app.cli.shared_options import (
    RUN,
    Certainty,
    Coverage,
    Data,
    Device,
    ErrorRate,
    FalseAlarmRate,
    Json,
    Network,
    Quiet,
    Strict,
    Threads,
    Trust,
    finish,
    set_threads,
)
from mola.options import counted


def predict(
    context: typer.Context,
    posterior: Annotated[Path, typer.Argument(help="Folder that `mola fit` wrote.")],
    inputs: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A folder of images, .npz, .npy, .csv, mnist:test, or package.module:function."
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="File to write: .csv, .jsonl or .npz; for pictures of label maps, a folder.")
    ] = Path("predictions.csv"),
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add the probabilities of all classes.")
    ] = False,
    false_alarm_rate: FalseAlarmRate = None,
    error_rate: ErrorRate = None,
    certainty: Certainty = None,
    coverage: Coverage = None,
    by_class: Annotated[
        bool, typer.Option("--by-class", help="Keep the coverage for each class, not only on average.")
    ] = False,
    data: Data = None,
    strict: Strict = False,
    network: Network = None,
    trust: Trust = False,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of links that draw samples.  [default: the link's own]", rich_help_panel=RUN),
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Predict with honest confidence: one row for each input.

    Each row has the name, label, class, confidence, entropy and its epistemic part, the outlier score, the distance from the
    training classes (1 is usual), and whether the input is outlying: its score is one that at most 5 % (--false-alarm-rate)
    of inputs like the validation data exceed. With --error-rate, `answer` says whether to answer: the input is not outlying,
    and the confidence high enough for what was promised. With --coverage, `set` names the classes that cannot be ruled out.
    Both need no further data: `mola fit` kept what is needed of the validation data. Inputs that cannot be read have a row
    with the error. Memory does not grow with the data. The options are saved beside the output, in a file that ends in
    `.toml`; to repeat the run: `mola predict --config FILE`.

    Where outputs are numbers, a row has the mean, standard deviation, ends of an interval and epistemic variance of each: the
    posterior's own 90 % interval, or with --coverage 0.9 one that holds 90 % of targets like those of the validation data,
    however wrong the posterior is. Of outputs at many positions, .npz holds all maps, a folder holds pictures of the labels,
    the confidence and the entropy, and tables hold averages.

        mola predict posterior images/ --output predictions.csv --error-rate 0.01 --coverage 0.9
    """
    from mola.app.jobs.folder import open_posterior
    from mola.app.jobs.maps import MapsResult, refuse_promises, run_maps
    from mola.app.jobs.predict import NumbersResult, PredictResult, run_predict
    from mola.distributed import join

    check_run(context, config, trust=trust)
    set_threads(threads)
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, device, trust=trust, network=network or ())
        result: PredictResult | NumbersResult | MapsResult | None
        shared: dict[str, Any] = {
            "probabilities": probabilities,
            "strict": strict,
            "directory": None if data is None else str(data),
            "seed": seed,
            "false_alarm_rate": false_alarm_rate,
            "team": team,
        }
        if fitted.posterior.is_dense:
            promises = {"--error-rate": error_rate, "--certainty": certainty, "--coverage": coverage}
            refuse_promises(fitted, {**promises, "--by-class": by_class or None})
            result = run_maps(fitted, inputs, output, progress, **shared)
        else:
            result = run_predict(
                fitted,
                inputs,
                output,
                progress,
                error_rate=error_rate,
                certainty=certainty,
                coverage=coverage,
                by_class=by_class,
                **shared,
            )
    if result is None:
        return  # one process writes and speaks for all
    write_run(context, output.with_name(f"{output.name}.toml"))
    if not quiet and not as_json:
        outlying = "" if result.outlying is None else f", {result.outlying:.1%} outlying"
        if isinstance(result, NumbersResult):
            words = f"mean standard deviation {result.std:.4g}, {result.epistemic:.1%} of the variance epistemic, intervals "
            words += f"{result.width:.4g} wide"
        elif isinstance(result, MapsResult):
            means = ", ".join(f"{name} {value:.4g}" for name, value in result.means.items())
            words = f"{result.positions:,} positions, mean {means}"
        else:
            words = f"mean confidence {result.confidence:.3f}, mean entropy {result.entropy:.3f} of which epistemic "
            words += f"{result.epistemic:.3f}"
            outlying += "" if result.answered is None else f", {result.answered:.1%} to answer"
            outlying += "" if result.set_size is None else f", {result.set_size:.2f} classes in a set"
        Console(highlight=False).print(
            f"Predicted {counted(result.count, 'input')} in {result.seconds:.1f} s: {words}{outlying}. Wrote "
            f"[bold]{escape(str(output))}[/bold].",
            soft_wrap=True,
        )
    # torchrun knows only success and failure: what was left out is said, but does not end the job.
    with suppress(*(typer.Exit,) if team.size > 1 else ()):
        finish(result.account, result.plain(), as_json=as_json, quiet=quiet)
