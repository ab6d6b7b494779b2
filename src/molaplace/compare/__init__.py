"""Comparisons of methods on the same data: tallies of predictions, results with standard errors, records and reports."""
