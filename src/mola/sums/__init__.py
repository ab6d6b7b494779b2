"""Training data in, sums of every network out: in one pass, resumed from files, added up over processes."""

from mola.sums.checkpoint import Keeper
from mola.sums.training_pass import sum_up

__all__ = ["Keeper", "sum_up"]
