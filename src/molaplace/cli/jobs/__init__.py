"""Implementations of the commands fit, predict, evaluate, export and bench."""
