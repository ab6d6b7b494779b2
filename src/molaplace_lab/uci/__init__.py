"""Experiments on the UCI regression sets: published splits, small networks, a record for each split, and tables of the records."""
