"""Experiments on the UCI regression sets: published splits, small networks, a record for each split, and tables of the records."""

from molaplace_lab.uci.comparison import UCI_METHODS, read_records, run_uci
from molaplace_lab.uci.data import SETS, read_uci
from molaplace_lab.uci.tables import as_good, gap_table, score_table

__all__ = ["SETS", "UCI_METHODS", "as_good", "gap_table", "read_records", "read_uci", "run_uci", "score_table"]
