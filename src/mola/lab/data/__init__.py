"""Data sets as tensors: labelled images, their shifts, and outliers."""
