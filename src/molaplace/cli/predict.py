"""`molaplace predict`: write one row of predictions for each input."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from molaplace.cli.command import write_run
from molaplace.cli.jobs.predict import PredictOptions, run_predict, summary_sentence
from molaplace.cli.jobs.rows import Account
from molaplace.cli.progress import showing_progress
from molaplace.cli.shared import finish


def predict(options: PredictOptions) -> None:
    """Write predictions with calibrated confidence, one row per input.

    A row contains the label, the confidence, the entropy with its epistemic and aleatoric parts, the OOD score, the distance
    from the training classes (1 is typical) and the OOD alarm. --error-rate adds selective prediction, and --coverage adds
    conformal sets. Both are calibrated on the validation data that were passed to `molaplace fit`. The row for an unusable input
    contains an error message instead. For multi-label networks, each label has its own columns. For regression, rows contain
    means, standard deviations and intervals. Dense outputs are written as maps (.npz) or as means over positions. The options
    are saved next to the output, in a .toml file for --config.

        molaplace predict posterior images/ -o predictions.csv --error-rate 0.01
    """
    from molaplace.cli.jobs.folder import open_posterior
    from molaplace.cli.jobs.writers import check_output
    from molaplace.distributed import join

    output, quiet, as_json = options.output, options.quiet, options.as_json
    check_output(output, options.inputs)
    with join() as team, showing_progress(quiet=quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(options.posterior, options.device, trust=options.trust, network=options.network)
        summary = run_predict(fitted, options, progress, team)
    if summary is None:
        return  # only rank 0 writes and prints
    write_run(options, "predict", output.with_name(f"{output.name}.toml"))
    if not quiet and not as_json:
        Console(highlight=False).print(
            f"{escape(summary_sentence(summary))} Wrote [bold]{escape(str(output))}[/bold].", soft_wrap=True
        )
    finish(Account(summary["left_out"]), summary, team, as_json=as_json, quiet=quiet)
