"""A job: the options of `molaplace fit` as one value, stored in `job.toml` next to a posterior.

Consent to run code (`--trust`) is never saved, because a file may come from a stranger.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from molaplace.cli.options import RUN, FolderOptions, RunOptions, option, read_options
from molaplace.data.preprocessing import Preprocessing
from molaplace.errors import OptionError
from molaplace.images import NORMALISATIONS
from molaplace.likelihoods import CATEGORICAL, GAUSSIAN, LIKELIHOODS, Gaussian, Likelihood, as_likelihood
from molaplace.links import LINKS
from molaplace.network import IGNORE_INDEX
from molaplace.rules import RULES, Outliers, Rule
from molaplace.structures import STRUCTURES

NAME = "job.toml"
"""Name of the job file next to a posterior."""

RULE_NAMES = (*RULES, "outliers", "none")
"""Names of rules on the command line. "outliers" needs outlier data, and "none" leaves the prior precision unchanged."""

WEIGHTINGS = ("uniform", "evidence", "stacking")

MODES = ("RGB", "L")

PREPARATION = "Preparation of images"
METHOD = "Method"
OTHER = "Regression and dense outputs"
"""Headings in the help text."""


def parse_numbers(value: Any) -> tuple[float, ...]:
    """Return the numbers in a list or a comma-separated string."""
    try:
        return tuple(float(number) for number in _joined(value, ",").split(","))
    except ValueError as error:
        raise _invalid("numbers separated by commas, such as 0.5,0.5,0.5", value) from error


def parse_size(value: Any) -> int | tuple[int, int]:
    """Return a length in pixels, or the height and width from a list or a string such as 224x160."""
    sides = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", _joined(value, "x").lower())
    if sides is None:
        raise _invalid("a length in pixels, or a height and width such as 224x160", value)
    return int(sides[1]) if sides[2] is None else (int(sides[1]), int(sides[2]))


def _joined(value: Any, separator: str) -> str:
    # Return a value from a run file in the form used on the command line.
    return separator.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _invalid(expected: str, value: Any) -> click.BadParameter:
    return click.BadParameter(f"expected {expected}; got {value!r}.")


def parse_class_names(value: Any) -> int | tuple[str, ...]:
    """Return the number of classes, or the class names read from a list, a comma-separated string or the lines of a file."""
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit()):
        return int(value)
    entries = value
    if isinstance(value, str):
        try:
            entries = Path(value).read_text(encoding="utf-8").splitlines()
        except OSError:  # the file does not exist, or the string is too long for a file name
            entries = value.split(",")
    names = tuple(name.strip() for name in entries if name.strip())
    if len(set(names)) != len(names) or len(names) < 2:
        expected = "a number, two or more different names separated by commas, or a file with one name on each line"
        raise _invalid(expected, value)
    return names


@dataclass(frozen=True, kw_only=True)
class Job(RunOptions, FolderOptions):
    """Options for `molaplace fit`. Those that do not affect the posterior are not stored."""

    weights: tuple[str, ...] = option(
        (),
        "Weight files (safetensors or torch.save), one per network, or a folder of such files",
        argument=True,
        is_path=True,
    )
    network: tuple[str, ...] = option(
        (), "Network: module:function, a Hugging Face folder or mlp. Can be repeated", is_path=True
    )
    train: str | None = option(
        None,
        "Training data: a folder with one subfolder of images per class, .npz, .csv, module:function, or digits:train",
        is_path=True,
    )
    val: str | None = option(None, "Validation data, in the same formats", is_path=True)
    likelihood: str = option(
        CATEGORICAL.name,
        "Meaning of the outputs: classes, several labels (bernoulli) or regression (gaussian)",
        choices=LIKELIHOODS,
    )
    rule: str | None = option(
        None,
        "Tuning rule",
        choices=RULE_NAMES,
        default_text=f"{CATEGORICAL.default_rule}; regression: {GAUSSIAN.default_rule}",
    )
    classes: int | tuple[str, ...] | None = option(
        None, "Class names in output order (a,b,c or a file), or the number of classes", parse=parse_class_names
    )
    output: Path = option(Path("posterior"), "Folder for the posterior", flags=("--output", "-o"), stored=False)
    strict: bool = option(False, "Stop at the first input that cannot be used")
    trust: bool = option(False, "Trust the --config file: import and run the functions that it names", stored=False)

    resize: int | tuple[int, int] | None = option(
        None, "Length of the shorter side (256), or height and width (32x32)", panel=PREPARATION, parse=parse_size
    )
    crop: int | None = option(None, "Side length of the square crop from the centre", panel=PREPARATION, minimum=1)
    mode: str | None = option(None, "Colour, or L for greyscale [default: detected]", panel=PREPARATION, choices=MODES)
    normalise: str | None = option(
        None,
        "Normalisation of x / 255 (alias: --normalize)",
        panel=PREPARATION,
        choices=NORMALISATIONS,
        flags=("--normalise", "--normalize"),
    )
    mean: tuple[float, ...] | None = option(
        None,
        "Mean of pixels, such as 0.5 or 0.49,0.48,0.45; with --std, used instead of --normalise",
        panel=PREPARATION,
        parse=parse_numbers,
    )
    std: tuple[float, ...] | None = option(None, "Standard deviation of pixels", panel=PREPARATION, parse=parse_numbers)
    workers: int = option(2, "Number of threads that decode images", panel=PREPARATION, minimum=1)

    structure: str = option("kron", "Covariance structure", panel=METHOD, choices=STRUCTURES)
    link: str = option("probit", "Link", panel=METHOD, choices=LINKS)
    mixing: str = option("uniform", "Mixture weights", panel=METHOD, choices=WEIGHTINGS)
    head: str | None = option(None, "Name of the last layer [default: detected]", panel=METHOD)
    prior_precision: float = option(1.0, "Prior precision for --rule none", panel=METHOD)
    threshold: float | None = option(None, "Minimum mean confidence, for --rule threshold", panel=METHOD)
    price: float | None = option(
        None,
        "Increase in log loss accepted in return for lower confidence far from the data: 0.02 means 2 %",
        panel=METHOD,
    )
    outliers: str | None = option(None, "OOD data for --rule outliers", panel=METHOD, is_path=True)
    distances: bool = option(True, "Compute class distances; --no-distances saves memory", panel=METHOD)

    noise: tuple[float, ...] | None = option(
        None, "Regression: standard deviation of the noise [default: estimated]", panel=OTHER, parse=parse_numbers
    )
    location: tuple[float, ...] | None = option(
        None, "Regression: mean of the targets", panel=OTHER, parse=parse_numbers
    )
    scale: tuple[float, ...] | None = option(
        None, "Regression: standard deviation of the targets", panel=OTHER, parse=parse_numbers
    )
    heteroscedastic: bool = option(False, "Regression: networks output log-variances after the means", panel=OTHER)
    positions: str = option("all", "Dense outputs: positions to use (all, average, or a number)", panel=OTHER)
    ignore_index: int = option(IGNORE_INDEX, "Dense outputs: label to ignore", panel=OTHER)

    batch_size: int = option(256, "Inputs per batch", panel=RUN, minimum=1)
    seed: int = option(0, "Random seed", panel=RUN, minimum=0, maximum=2**63 - 1)
    device: str = option("cpu", "Device to compute on, such as cuda", panel=RUN)
    bundle: bool = option(False, "Copy the weights into the folder, so that it can be moved", panel=RUN, stored=False)
    checkpoint: Path | None = option(
        None, "Folder for checkpoints, from which an interrupted fit can resume", panel=RUN, stored=False
    )

    def prepare(self, hints: Preprocessing) -> Preprocessing:
        """Return the preparation of inputs that the options specify; those that are omitted are the networks' own."""
        names = ("resize", "crop", "mode", "normalise", "mean", "std", "batch_size", "workers")
        return hints.changed(**{name: getattr(self, name) for name in names})

    def make_likelihood(self) -> Likelihood:
        """Return the likelihood with its settings."""
        likelihood = as_likelihood(self.likelihood)
        settings = {name: getattr(self, name) for name in ("noise", "location", "scale", "heteroscedastic")}
        settings = {name: value for name, value in settings.items() if value not in (None, False)}
        if settings and not isinstance(likelihood, Gaussian):
            raise OptionError(
                f"--{next(iter(settings))} applies only to --likelihood gaussian; got --likelihood {self.likelihood}."
            )
        return replace(likelihood, **settings) if isinstance(likelihood, Gaussian) else likelihood

    @property
    def rule_name(self) -> str:
        """Name of the rule; by default, the likelihood's default rule."""
        return self.rule or LIKELIHOODS[self.likelihood].default_rule

    def make_rule(self, outliers: Iterable[Any] | None = None) -> Rule | None:
        """Return the rule with its settings, or None if the prior precision is not tuned.

        `outliers` are needed when the rule "outliers" is applied, not when the options are checked.
        """
        name = self.rule_name
        settings = {"confidence": ("--threshold", self.threshold), "price": ("--price", self.price)}
        values = {field: value for field, (_, value) in settings.items() if value is not None}
        for field in values:
            accepting = [rule_name for rule_name, rule in RULES.items() if hasattr(rule, field)]
            if name not in accepting:
                raise OptionError(
                    f"{settings[field][0]} applies only to --rule {' or '.join(accepting)}; got --rule {name}."
                )
        if self.prior_precision != 1.0 and name != "none":
            raise OptionError(
                f"--prior-precision applies only to --rule none, but --rule {name} chooses the prior precision. Omit one "
                f"of the two options."
            )
        if (name == "outliers") != (self.outliers is not None):
            raise OptionError("--rule outliers and --outliers DATA require each other. Pass both or neither.")
        if name == "outliers":
            return Outliers([] if outliers is None else outliers)
        return None if name == "none" else replace(RULES[name], **values)  # type: ignore[type-var]


def job_of(document: Mapping[str, Any], path: Path) -> Job:
    """Return the job stored in a document; paths are relative to the folder that contains the file `path`."""
    return Job(**read_options(document, Job, "fit", path))
