"""Training data in, sums of every network out: in one pass, resumed from files, added up over processes."""

from mola.sums.checkpoint import SumsCheckpoint
from mola.sums.training_pass import sum_up

__all__ = ["SumsCheckpoint", "sum_up"]
