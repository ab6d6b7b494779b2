"""Methods compared on the same data: tallies of predictions, metrics with standard errors, records, and reports."""

from mola.compare.measured import Lead, Measurement, area_between, mean_of
from mola.compare.tally import SCORES, Answer, Tally, TallyRows, tally_set

__all__ = ["SCORES", "Answer", "Lead", "Measurement", "Tally", "TallyRows", "area_between", "mean_of", "tally_set"]
