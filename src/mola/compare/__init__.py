"""Methods compared on the same data: tallies that add up, numbers with their errors, and which lead is more than chance."""

from mola.compare.measured import (
    CLEAR,
    Lead,
    Measurement,
    area_between,
    calibration_error,
    lead,
    mean_of,
    pass_rate,
    root_mean_of,
)
from mola.compare.tally import SCORES, Answer, Said, Tally, tally_set

__all__ = [
    "CLEAR",
    "SCORES",
    "Answer",
    "Lead",
    "Measurement",
    "Said",
    "Tally",
    "area_between",
    "calibration_error",
    "lead",
    "mean_of",
    "pass_rate",
    "root_mean_of",
    "tally_set",
]
