"""The commands: each calls the library with its options, and prints the result. What they import is imported when they run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from molaplace.cli.job import Job, Weights
from molaplace.cli.options import (
    DECISIONS,
    MORE,
    RUN,
    DecisionOptions,
    FolderOptions,
    Names,
    PosteriorOptions,
    RunOptions,
    about,
    stored_options,
    to_toml,
    whole_number,
)

__all__ = ["COMMANDS", "Job"]

ALARM = 3
"""Exit code of a run of `molaplace watch` whose stream has left the validation data."""

Posterior = Annotated[Path, about("Folder written by `molaplace fit`")]
Output = Parameter(name=("--output", "-o"))


# --- fit -------------------------------------------------------------------------------------------------------------


def fit(weights: Weights = (), *, options: Job = Job()) -> int:  # noqa: B008
    """Fit a posterior to calibrate the confidence of trained networks.

    Fits a Laplace approximation to the last layer of each network in one pass over the training data and tunes it on the
    validation data. Writes a folder that the other commands open. Supports classification, multi-label classification, regression
    and dense outputs. The validation data are also used to calibrate OOD alarms, selective prediction and conformal sets. The
    networks are neither retrained nor changed.

        molaplace fit a.pt b.pt --network my:net --train train.npz --val val.npz
    """
    from molaplace.cli.fit import run_fit
    from molaplace.cli.info import print_information, read_information
    from molaplace.cli.terminal import console, finish, showing_progress
    from molaplace.data.dataset import SkippedInputs
    from molaplace.distributed import join

    with join() as team:
        quiet = options.quiet or not team.first  # only one process writes and prints
        as_json = options.as_json and team.first
        with showing_progress(quiet=quiet) as progress:
            summary = run_fit(replace(options, weights=weights), progress, team)
    if not quiet and not as_json:
        instead = ", which replaces the earlier posterior" if summary["replaced"] else ""
        print_information(console(), read_information(options.output))
        console().print(
            f"Wrote {options.output}{instead}. Next: molaplace predict {options.output} DATA -o predictions.csv",
            soft_wrap=True,
            markup=False,
        )
    return finish(SkippedInputs(summary["left_out"]), summary, team, as_json=as_json, quiet=quiet)


# --- predict ---------------------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PredictOptions(PosteriorOptions, DecisionOptions, RunOptions):
    """Options for `molaplace predict`."""

    output: Annotated[Path, Output, about("File to write: .csv, .jsonl, .parquet or .npz")] = Path("predictions.csv")
    probabilities: Annotated[bool, about("Add the probabilities of all classes")] = False
    by_class: Annotated[bool, about("Guarantee the coverage for each class, not only on average", DECISIONS)] = False
    strict: Annotated[bool, about("Stop at the first input that cannot be used", MORE)] = False


def predict(
    posterior: Posterior,
    inputs: Annotated[str, about("A folder of images, .npz, .npy, .csv, or package.module:function")],
    *,
    options: PredictOptions = PredictOptions(),  # noqa: B008
) -> int:
    """Write predictions with calibrated confidence, one row per input.

    A row contains the label, the confidence, the entropy with its epistemic and aleatoric parts, the OOD score, the distance
    from the training classes (1 is typical) and the OOD alarm. --error-rate adds selective prediction, and --coverage adds
    conformal sets. Both are calibrated on the validation data that were passed to `molaplace fit`. The row for an unusable input
    contains an error message instead. For multi-label networks, each label has its own columns. For regression, rows contain
    means, standard deviations and intervals. Dense outputs are written as maps (.npz) or as means over positions. The options
    are saved next to the output, in a .toml file for --config.

        molaplace predict posterior images/ -o predictions.csv --error-rate 0.01
    """
    from molaplace.cli.decisions import make_decisions
    from molaplace.cli.folder import open_posterior
    from molaplace.cli.predict import run_predict, summary_sentence
    from molaplace.cli.terminal import console, finish, showing_progress
    from molaplace.cli.writers import check_output
    from molaplace.data.dataset import SkippedInputs
    from molaplace.distributed import join
    from molaplace.saving.files import write_atomically

    output = options.output
    check_output(output, inputs)
    with join() as team, showing_progress(quiet=options.quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, options.device, trust=options.trust, network=options.network)
        decisions = make_decisions(fitted, by_class=options.by_class, **options.rates())
        more = {"probabilities": options.probabilities, "strict": options.strict}
        summary = run_predict(fitted, inputs, output, decisions, **more, progress=progress, team=team)
    if summary is None:
        return 0  # only rank 0 writes and prints
    run = to_toml(stored_options("predict", options, posterior=posterior, inputs=inputs))
    write_atomically(output.with_name(f"{output.name}.toml"), run.encode())
    if not options.quiet and not options.as_json:
        console().print(f"{summary_sentence(summary)} Wrote {output}.", soft_wrap=True, markup=False)
    left_out = SkippedInputs(summary["left_out"])
    return finish(left_out, summary, team, as_json=options.as_json, quiet=options.quiet)


# --- evaluate --------------------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PosteriorOptions, RunOptions, FolderOptions):
    """Options for `molaplace evaluate`."""

    test: Annotated[str, about("Labelled test data, in any form that `molaplace fit --train` accepts")]
    ood: Annotated[tuple[str, ...], about("OOD data (labels are ignored); can be repeated")] = ()
    output: Annotated[Path, Output, about("Folder for the page, the figures and the numbers")] = Path("evaluation")
    val: Annotated[
        str | None,
        about(
            "Validation data for tuning temperatures, noise and LLLA",
            MORE,
            show_default=lambda _: "validation data of the fit",
        ),
    ] = None
    strict: Annotated[bool, about("Stop at the first input that cannot be used", MORE)] = False


def evaluate(posterior: Posterior, *, options: EvaluateOptions) -> int:
    """Compare MAP, temperature scaling, the deep ensemble, LLLA and MoLA on your own data.

    Classification, including multi-label: accuracy, NLL, Brier score and calibration (ECE), overall and for each class, plus
    selective prediction and conformal sets. Regression: RMSE, NLL, CRPS, and the coverage and width of intervals. With --ood: OOD
    detection using every score of each method. All numbers come with standard errors. Dense outputs are evaluated at up to 256
    positions in each input. Writes a self-contained index.html, numbers.json, tables.md, the figures, and a run.toml file for
    --config.

        molaplace evaluate posterior --test images/test --ood images/strange
    """
    from molaplace.cli.evaluate import print_summary, run_evaluate
    from molaplace.cli.folder import open_posterior
    from molaplace.cli.terminal import finish, showing_progress
    from molaplace.data.dataset import SkippedInputs
    from molaplace.distributed import join
    from molaplace.progress import part
    from molaplace.report.writing import EVALUATION, PAGE, RUN_FILE, write_page, write_texts
    from molaplace.saving.files import check_folder, check_writable, replacing

    output = options.output
    check_writable(output)
    check_folder(output, EVALUATION, (PAGE, RUN_FILE), overwrite=options.overwrite)
    with join() as team, showing_progress(quiet=options.quiet or not team.first) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, options.device, trust=options.trust, network=options.network)
        measuring = part(progress, 0.0, 0.8)
        sets: dict[str, Any] = {"ood": options.ood, "val": options.val, "strict": options.strict}
        evaluation = run_evaluate(fitted, options.test, **sets, progress=measuring, team=team)
        if not team.first:
            return 0  # only rank 0 writes and prints
        run = to_toml(stored_options("evaluate", options, posterior=posterior))
        with replacing(output, EVALUATION, (PAGE,), overwrite=True) as folder:  # as checked above
            write_page(evaluation, folder, part(progress, 0.8, 1.0))
            write_texts({RUN_FILE: run}, folder)
    if not options.quiet and not options.as_json:
        print_summary(evaluation, output / PAGE)
    left_out = SkippedInputs(evaluation.left_out)
    return finish(left_out, evaluation.document(), team, as_json=options.as_json, quiet=options.quiet)


# --- watch -----------------------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WatchOptions(PosteriorOptions, RunOptions):
    """Options for `molaplace watch`."""

    log: Annotated[
        Path, about("Log to append to, a line for each run; the page and the state are written beside it")
    ] = Path("watch.jsonl")
    alpha: Annotated[float, about("Probability of a false alarm over the whole life of the log")] = 0.01
    recent: Annotated[int, whole_number(1), about("Number of recent inputs whose accuracy is estimated")] = 1000
    val: Annotated[
        str | None,
        about("Labelled data to compare with", MORE, show_default=lambda _: "validation data stored in the folder"),
    ] = None
    strict: Annotated[bool, about("Stop at the first input that cannot be used", MORE)] = False


def watch(
    posterior: Posterior,
    inputs: Annotated[
        str, about("New inputs, in any order: a folder of images, .npz, .npy, .csv, or package.module:function")
    ],
    *,
    options: WatchOptions = WatchOptions(),  # noqa: B008
) -> int:
    """Watch new inputs: raise an alarm if they change, and estimate the accuracy without labels.

    Run the command for each delivery of new inputs, with the same --log. It appends a line, writes a page with the course
    over time, and prints whether the inputs still look like the validation data, how accurate the predictions are, and which
    inputs are strangest. If nothing changes, the probability that any run ever raises an alarm is at most --alpha. An alarm stays until
    you begin a new log. Inputs that are in the log already, with the same name and content, are passed over, so a delivery may be
    repeated or grow. The new inputs of a run are counted in a fixed pseudo-random order, so a folder may be sorted by class. The exit
    code is 3 if there is an alarm, and 0 if not.

        molaplace watch posterior new-images/ --log watch.jsonl
    """
    from molaplace.cli.folder import open_posterior
    from molaplace.cli.terminal import console, showing_progress
    from molaplace.cli.watch import check_log, run_watch

    check_log(options.log)
    with showing_progress(quiet=options.quiet) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, options.device, trust=options.trust, network=options.network)
        run = to_toml(stored_options("watch", options, posterior=posterior, inputs=inputs))
        settings = {name: getattr(options, name) for name in ("alpha", "recent", "val", "strict")}
        watched = run_watch(fitted, inputs, options.log, **settings, run=run, progress=progress)
    if options.as_json:
        readings = {name: asdict(getattr(watched.watch, name)) for name in ("alarm", "accuracy")}
        write_json({"inputs": watched.watch.count, **readings, "left_out": watched.skipped.left_out})
    elif not options.quiet:
        for sentence in watched.sentences:
            console().print(sentence, soft_wrap=True, markup=False)
        for line in watched.skipped.lines():
            console(stderr=True).print(line, soft_wrap=True, markup=False)
    return ALARM if watched.watch.alarm else 0


# --- export ----------------------------------------------------------------------------------------------------------


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExportOptions(PosteriorOptions, DecisionOptions, RunOptions):
    """Options for `molaplace export`."""

    onnx: Annotated[Path | None, about("ONNX file to write; it runs without PyTorch")] = None
    torch: Annotated[Path | None, about("torch.export file to write (.pt2)")] = None
    pixels: Annotated[
        bool, about("Accept pixels as bytes, and normalise them in the same way as the training data")
    ] = False
    float16: Annotated[bool, about("Store the networks in half precision")] = False
    outputs: Annotated[
        Names,
        about(
            "Outputs, separated by commas: probs, label, confidence, entropy, epistemic, aleatoric, ood_score, distance; "
            "for regression: mean, variance, epistemic, aleatoric, ood_score, distance",
            show_default=lambda _: "all",
        ),
    ] = None
    check: Annotated[bool, about("Check the file's outputs against PyTorch's")] = True


def export(posterior: Posterior, *, options: ExportOptions = ExportOptions()) -> None:  # noqa: B008
    """Export the networks and the Bayesian head as one model that outputs probabilities and uncertainty.

    The model accepts batches of any size. Class names, tuning settings and the thresholds for the decisions below are stored in
    the file as editable properties. The file is written only if its outputs agree with PyTorch's on random inputs.

        molaplace export posterior --onnx model.onnx
    """
    from molaplace.cli.decisions import make_decisions
    from molaplace.cli.export import check_export, run_export, show
    from molaplace.cli.folder import open_posterior
    from molaplace.cli.terminal import console, showing_progress

    check_export(options.onnx, options.torch)
    with showing_progress(quiet=options.quiet) as progress:
        progress("loading networks", 0.0)
        fitted = open_posterior(posterior, options.device, trust=options.trust, network=options.network)
        progress("writing the graph", 0.3)
        run = to_toml(stored_options("export", options, posterior=posterior))
        written = run_export(
            fitted,
            make_decisions(fitted, **options.rates()),
            onnx=options.onnx,
            torch_file=options.torch,
            pixels=options.pixels,
            run=run,
            outputs=options.outputs,
            float16=options.float16,
            check=options.check,
        )
        progress("done", 1.0)
    if options.as_json:
        write_json([file.plain() for file in written])
    elif not options.quiet:
        for file in written:
            show(console(), file)


# --- info, demo ------------------------------------------------------------------------------------------------------


def info(
    posterior: Annotated[Path, about("Folder written by molaplace, such as a posterior")],
    *,
    as_json: Annotated[bool, about("Print the folder's document as JSON", name="--json", negative="")] = False,
) -> None:
    """Show the tuning, contents and history of a posterior without loading its networks.

    Also verifies the checksums of the files. Of other folders that molaplace wrote, such as pages and watches, the files are listed.

        molaplace info posterior
    """
    from molaplace.cli.info import print_information, read_information
    from molaplace.cli.terminal import console

    information = read_information(posterior)
    if as_json:
        write_json(information)
    else:
        print_information(console(), information)


def demo(
    *,
    output: Annotated[Path, Output, about("Folder for the page, the figures and the numbers")] = Path("demo-results"),
    seed: Annotated[
        int, whole_number(0, 2**31 - 1), about("Random seed for the split, the networks and the noise")
    ] = 0,
    quiet: Annotated[bool, about("Print nothing", RUN, negative="")] = False,
    options: FolderOptions = FolderOptions(),  # noqa: B008
) -> None:
    """Compare single networks, deep ensembles and MoLA (with the paper's and the default rule) on handwritten digits.

    Trains five small networks on data bundled with scikit-learn, fits and tunes posteriors, and compares the methods on test
    data, rotated digits and OOD inputs. Writes a web page with tables and figures, and the networks.
    """
    from molaplace.cli.evaluate import print_summary
    from molaplace.cli.terminal import showing_progress
    from molaplace.demo.run import DEMO, DemoSettings, run_demo, write_demo
    from molaplace.progress import part
    from molaplace.report.writing import PAGE
    from molaplace.saving.files import check_folder, check_writable

    check_writable(output)
    check_folder(output, DEMO, (PAGE,), overwrite=options.overwrite)
    with showing_progress(quiet=quiet) as progress:
        result = run_demo(DemoSettings(seed=seed), part(progress, 0.0, 0.85))
        page = write_demo(result, output, part(progress, 0.85, 1.0), overwrite=True)  # as checked above
    if not quiet:
        print_summary(result.evaluation, page)


def write_json(document: object) -> None:
    """Print a document as JSON."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


COMMANDS = (fit, predict, evaluate, watch, export, info, demo)
"""The commands, in the order of the help."""
