"""Tables of `mola evaluate` where outputs are numbers: errors, densities, intervals, differences, and output by output."""

from __future__ import annotations

import math

from mola.compare.record import Comparison, SetInfo
from mola.compare.regression import LEVELS
from mola.compare.report.estimate import Estimate, On
from mola.compare.report.single_run_tables import BOLD, outlier_tables, set_words
from mola.compare.report.tables import Column, Number, Shown, Table, make_table, records_table

MOST_DIGITS = 8


def _digits(errors: list[float], values: list[float]) -> int:
    # Decimals that show two digits of the smallest error; but, as what is constant has next to none, at most five of
    # the values.
    largest = max((abs(one) for one in values), default=0.0)
    if largest == 0:
        return 1
    most = 4 - math.floor(math.log10(largest))
    known = [one for one in errors if one > 1e-6 * largest]
    wanted = 1 - math.floor(math.log10(min(known))) if known else most
    return min(MOST_DIGITS, max(0, min(wanted, most)))


def digits_of(comparison: Comparison, metric: str) -> int:
    """Decimals of a metric on the test data: targets may be in any unit."""
    found = [one.labelled[comparison.test.name] for one in comparison.methods.values()]
    errors = [one.errors.get(metric) for one in found]
    return _digits([one for one in errors if one is not None], [one.metrics[metric] for one in found])


def number_tables(comparison: Comparison) -> list[Table]:
    """On the test data: scores, intervals, differences, promises; then against each set of outliers."""
    outside = [table for one in comparison.of_role("outlier") for table in _against(comparison, one)]
    gaps = [_differences(comparison)] if comparison.differences else []
    return [_scores(comparison), _intervals(comparison), *gaps, *_promises(comparison), *outside]


def _scores(comparison: Comparison) -> Table:
    test = comparison.test.name
    names = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS", "std": "mean std."}
    shown = [
        Shown(
            Column(title, better=None if metric == "std" else "low", digits=digits_of(comparison, metric)),
            On(test, metric),
        )
        for metric, title in names.items()
    ]
    several = (
        " RMSE, CRPS and standard deviations are means over outputs, so where these have different units, the largest decide: see the "
        "table of outputs. The likelihood is that of all of them."
    )
    caption = (
        f"{set_words(comparison.test)}, targets in their own units, with standard errors: how far chance alone moves a number on so "
        f"many inputs. {BOLD.format('')} NLL: negative log-likelihood, in nats. CRPS: continuous ranked probability score, in the "
        f"targets' units.{several if len(comparison.classes) > 1 else ''}"
    )
    return records_table("On the test data", caption, comparison.runs, shown, leads=comparison.leads)


def _intervals(comparison: Comparison) -> Table:
    test, names = comparison.test.name, [f"{100 * level:g}" for level in LEVELS]
    held = [Shown(Column(f"{name} %", "held, in %", digits=1), On(test, f"coverage_{name}"), 100) for name in names]
    digits = max(digits_of(comparison, f"width_{name}") for name in names)
    wide = [Shown(Column(f"{name} %", "mean width", digits=digits), On(test, f"width_{name}")) for name in names]
    caption = (
        "How often the central intervals of each method hold the target, by the probability that they are made for, and how wide they "
        "are, in the targets' units. Of two methods whose intervals hold as often as they say, the one with the narrower ones knows "
        "more. With standard errors."
    )
    return records_table("Intervals", caption, comparison.runs, [*held, *wide], leads={test: {}})


def _differences(comparison: Comparison) -> Table:
    names = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS"}
    found = comparison.differences
    digits = {
        name: _digits([one[name][1] or 0.0 for one in found.values()], [one[name][0] for one in found.values()])
        for name in names
    }
    columns = [Column(title, digits=digits[name]) for name, title in names.items()]
    values: dict[str, list[Number]] = {
        method: [Estimate(one[name][0], one[name][1], 1) for name in names] for method, one in found.items()
    }
    caption = (
        f"What each method has more than {comparison.own}, taken input by input, so that what all methods find hard cancels: above 0, "
        f"{comparison.own} is better. A difference of less than two standard errors may be chance."
    )
    return make_table(f"Compared with {comparison.own}", caption, columns, values, best=set())


def _promises(comparison: Comparison) -> list[Table]:
    found = comparison.decisions
    if found is None:
        return []
    digits = max(digits_of(comparison, f"width_{100 * level:g}") for level in LEVELS)
    values: dict[str, list[Number]] = {
        "alarms on usual data": [100 * found.false_alarm_rate, 100 * found.alarms, None],
        **{
            f"{100 * one.promised:g} % intervals": [
                100 * one.promised,
                Estimate(one.realised, one.realised_error, 1).scaled(100),
                one.width,
            ]
            for one in found.intervals
        },
    }
    caption = (
        f"Thresholds and intervals were calibrated on the validation data; the test data show what became of the promises, give or "
        f"take chance. `mola predict --coverage 0.9` writes such intervals of {comparison.own}."
    )
    columns = [Column("promised %"), Column("on test data %", digits=1), Column("mean width", digits=digits)]
    return [make_table("Decisions", caption, columns, values, best=set())]


def _against(comparison: Comparison, one: SetInfo) -> tuple[Table, Table]:
    wide = Shown(Column("mean std.", digits=digits_of(comparison, "std")), On(one.name, "std"))
    return outlier_tables(comparison, one, wide)


def output_table(comparison: Comparison) -> Table | None:
    """Output by output, the networks alone beside the posterior; None where there is one output."""
    methods, test = list(dict.fromkeys((comparison.baseline, comparison.own))), comparison.test.name
    found = {name: comparison.methods[name].labelled[test].regression for name in methods}
    known = {name: one.outputs for name, one in found.items() if one is not None}
    names = list(next(iter(known.values()), {}))
    if len(names) < 2:
        return None
    shown = {"rmse": "RMSE", "nll": "NLL", "crps": "CRPS", "coverage_90": "90 % held, %"}

    def number(method: str, output: str, metric: str) -> Estimate:
        one = known[method][output]
        return Estimate(one.metrics[metric], one.errors[metric], 1).scaled(100 if metric == "coverage_90" else 1)

    def digits(output: str, metric: str) -> int:
        if metric == "coverage_90":
            return 1
        both = [outputs[output] for outputs in known.values()]
        return _digits([one.errors[metric] or 0.0 for one in both], [one.metrics[metric] for one in both])

    columns = [Column(method, title) for title in shown.values() for method in methods]
    values: dict[str, list[Number]] = {
        output: [number(method, output, metric) for metric in shown for method in methods] for output in names
    }
    many = len(comparison.classes)
    title = "Output by output" if many == len(names) else f"The first {len(names)} of {many} outputs"
    caption = "Each output by itself, in its own units, with standard errors. Last: how often 90 % intervals hold it."
    # A price beside a temperature: decimals that suit the one would hide all of the other.
    decimals = {output: [digits(output, metric) for metric in shown for _ in methods] for output in names}
    return make_table(title, caption, columns, values, best=set(), digits=decimals)
