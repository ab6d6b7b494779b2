"""Data sets as tensors: labelled images, shifted versions of them, and outliers."""
