"""Training data in, sums of every network out: in one pass, resumed from files, added up over processes."""

from mola.summing.checkpoint import Keeper
from mola.summing.training_pass import sum_up

__all__ = ["Keeper", "sum_up"]
