"""`mola predict`: a row for each input."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

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
        Path,
        typer.Option(help="File to write: .csv, .jsonl, .parquet or .npz; for pictures of dense outputs, a folder."),
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

    Each row has the name, label, class, confidence, entropy with its epistemic and aleatoric parts, the outlier score, the
    distance from the training classes (1 is usual), and whether the input is outlying: at most 5 % (--false-alarm-rate) of
    inputs like the validation data have such a score. With --error-rate, `answer` is true for inputs to answer: those that are
    not outlying and whose confidence is high enough for this error rate. With --coverage, `set` lists the classes that cannot
    be ruled out. Neither needs further data: `mola fit` kept what is needed of the validation data. Unusable inputs have a row
    with the error. Memory does not grow with the data. The options are saved beside the output, in a file that ends in `.toml`;
    to repeat the run: `mola predict --config FILE`.

    Multi-label networks have these columns for each label. A regression has the mean, standard deviation, interval, epistemic
    and aleatoric variance of each target: the posterior's own 90 % interval, or with --coverage 0.9 an interval that contains
    90 % of targets like those of the validation data, however wrong the posterior is. Of dense outputs, .npz holds all maps, a
    folder holds pictures of the labels, the confidence and the entropy, and tables hold means over positions.

        mola predict posterior images/ --output predictions.csv --error-rate 0.01 --coverage 0.9
    """
    from mola.app.jobs.folder import open_posterior
    from mola.app.jobs.predict import run_predict
    from mola.app.jobs.writers import check_output
    from mola.distributed import join

    check_run(context, config, trust=trust)
    check_output(output, inputs)
    set_threads(threads)
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, device, trust=trust, network=network or ())
        result = run_predict(
            fitted,
            inputs,
            output,
            progress,
            probabilities=probabilities,
            strict=strict,
            directory=None if data is None else str(data),
            seed=seed,
            false_alarm_rate=false_alarm_rate,
            error_rate=error_rate,
            certainty=certainty,
            coverage=coverage,
            by_class=by_class,
            team=team,
        )
    if result is None:
        return  # rank 0 writes and prints
    write_run(context, output.with_name(f"{output.name}.toml"))
    if not quiet and not as_json:
        Console(highlight=False).print(
            f"{escape(result.sentence())} Wrote [bold]{escape(str(output))}[/bold].", soft_wrap=True
        )
    # torchrun knows only success and failure: inputs that were left out are listed, but do not end the job.
    with suppress(*(typer.Exit,) if team.size > 1 else ()):
        finish(result.account, result.plain(), as_json=as_json, quiet=quiet)
