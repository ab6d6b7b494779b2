"""A job: the options of `molaplace fit` as one value, stored in `job.toml` next to a posterior."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from molaplace.cli.options import (
    RUN,
    ClassNames,
    FolderOptions,
    Numbers,
    RunOptions,
    Size,
    about,
    parsed_options,
    stored_options,
    whole_number,
)
from molaplace.errors import OptionError

if TYPE_CHECKING:
    from molaplace.data.preprocessing import Preprocessing
    from molaplace.likelihoods import Likelihood
    from molaplace.rules import Rule

NAME = "job.toml"
"""Name of the job file next to a posterior."""

RuleName = Literal[
    "threshold", "nll", "brier", "ece", "crps", "evidence", "distance", "calibrated", "temperature", "outliers", "none"
]
"""Names of rules on the command line. "outliers" needs outlier data, and "none" leaves the prior precision unchanged."""

PREPARATION = Group("Preparation of images", sort_key=3)
METHOD = Group("Method", sort_key=4)
OTHER = Group("Regression and dense outputs", sort_key=5)
"""Headings in the help text."""

Weights = Annotated[
    tuple[str, ...], about("Weight files (safetensors or torch.save), one per network, or a folder of such files")
]


def _default(text: str) -> Any:
    # Show this text as the default value.
    return lambda _: text


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job(RunOptions, FolderOptions):
    """Options for `molaplace fit`. Those that do not affect the posterior are not stored."""

    weights: Annotated[tuple[str, ...], Parameter(parse=False)] = ()
    network: Annotated[
        tuple[str, ...], about("Network: module:function, a Hugging Face folder or mlp. Can be repeated")
    ] = ()
    train: Annotated[
        str | None,
        about(
            "Training data: a folder with one subfolder of images per class, .npz, .csv, module:function, or digits:train"
        ),
    ] = None
    val: Annotated[str | None, about("Validation data, in the same formats")] = None
    likelihood: Annotated[
        Literal["categorical", "bernoulli", "gaussian"],
        about("Meaning of the outputs: classes, several labels (bernoulli) or regression (gaussian)"),
    ] = "categorical"
    rule: Annotated[RuleName | None, about("Tuning rule", show_default=_default("calibrated; regression: nll"))] = None
    classes: Annotated[ClassNames, about("Class names in output order (a,b,c or a file), or the number of classes")] = (
        None
    )
    output: Annotated[Path, about("Folder for the posterior", name=("--output", "-o"))] = Path("posterior")
    strict: Annotated[bool, about("Stop at the first input that cannot be used")] = False
    trust: Annotated[
        bool, about("Trust the --config file: import and run the functions that it names", negative="")
    ] = False

    resize: Annotated[Size, about("Length of the shorter side (256), or height and width (32x32)", PREPARATION)] = None
    crop: Annotated[
        int | None, whole_number(1), about("Side length of the square crop from the centre", PREPARATION)
    ] = None
    mode: Annotated[
        Literal["RGB", "L"] | None, about("Colour, or L for greyscale", PREPARATION, show_default=_default("detected"))
    ] = None
    normalise: Annotated[
        Literal["none", "cifar10", "imagenet"] | None,
        about("Normalisation of x / 255", PREPARATION, name=("--normalise", "--normalize")),
    ] = None
    mean: Annotated[
        Numbers,
        about("Mean of pixels, such as 0.5 or 0.49,0.48,0.45; with --std, used instead of --normalise", PREPARATION),
    ] = None
    std: Annotated[Numbers, about("Standard deviation of pixels", PREPARATION)] = None
    workers: Annotated[int, whole_number(1), about("Number of threads that decode images", PREPARATION)] = 2

    structure: Annotated[
        Literal["kron", "kron-exact", "kron-diag", "diag", "full"], about("Covariance structure", METHOD)
    ] = "kron"
    link: Annotated[Literal["probit", "probit-centred", "mean-field", "bridge", "mc"], about("Link", METHOD)] = "probit"
    mixing: Annotated[Literal["uniform", "evidence", "stacking"], about("Mixture weights", METHOD)] = "uniform"
    head: Annotated[str | None, about("Name of the last layer", METHOD, show_default=_default("detected"))] = None
    prior_precision: Annotated[float, about("Prior precision for --rule none", METHOD)] = 1.0
    threshold: Annotated[float | None, about("Minimum mean confidence, for --rule threshold", METHOD)] = None
    price: Annotated[
        float | None,
        about("Increase in log loss accepted in return for lower confidence far from the data: 0.02 means 2 %", METHOD),
    ] = None
    outliers: Annotated[str | None, about("OOD data for --rule outliers", METHOD)] = None
    distances: Annotated[bool, about("Compute class distances; --no-distances saves memory", METHOD)] = True

    noise: Annotated[
        Numbers, about("Regression: standard deviation of the noise", OTHER, show_default=_default("estimated"))
    ] = None
    location: Annotated[Numbers, about("Regression: mean of the targets", OTHER)] = None
    scale: Annotated[Numbers, about("Regression: standard deviation of the targets", OTHER)] = None
    heteroscedastic: Annotated[bool, about("Regression: networks output log-variances after the means", OTHER)] = False
    positions: Annotated[str, about("Dense outputs: positions to use (all, average, or a number)", OTHER)] = "all"
    ignore_index: Annotated[int, whole_number(), about("Dense outputs: label to ignore", OTHER)] = -100

    batch_size: Annotated[int, whole_number(1), about("Inputs per batch", RUN)] = 256
    seed: Annotated[int, whole_number(0, 2**63 - 1), about("Random seed", RUN)] = 0
    device: Annotated[str, about("Device to compute on, such as cuda", RUN)] = "cpu"
    bundle: Annotated[bool, about("Copy the weights into the folder, so that it can be moved", RUN, negative="")] = (
        False
    )
    checkpoint: Annotated[
        Path | None, about("Folder for checkpoints, from which an interrupted fit can resume", RUN)
    ] = None

    def as_document(self) -> dict[str, Any]:
        """Return the document of the run file; the folder of the posterior is not stored in it."""
        return stored_options("fit", self, output=None)

    def prepare(self, hints: Preprocessing) -> Preprocessing:
        """Return the preparation of inputs that the options specify; those that are omitted are the networks' own."""
        names = ("resize", "crop", "mode", "normalise", "mean", "std", "batch_size", "workers")
        return hints.changed(**{name: getattr(self, name) for name in names})

    def make_likelihood(self) -> Likelihood:
        """Return the likelihood with its settings."""
        from molaplace.likelihoods import Gaussian, as_likelihood

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
        from molaplace.likelihoods import LIKELIHOODS

        return self.rule or LIKELIHOODS[self.likelihood].default_rule

    def make_rule(self, outliers: Iterable[Any] | None = None) -> Rule | None:
        """Return the rule with its settings, or None if the prior precision is not tuned.

        `outliers` are needed when the rule "outliers" is applied, not when the options are checked.
        """
        from molaplace.rules import RULES, Outliers

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
    """Return the job in the document of a run file, which the file `path` holds."""

    def fit(weights: Weights = (), *, options: Job = Job()) -> None:  # noqa: B008  (frozen)
        pass

    arguments = parsed_options(fit, document, path)
    return replace(arguments.get("options", Job()), weights=arguments.get("weights", ()))
