"""Comparisons: data and networks in, plain result objects out. Nothing here draws or prints."""
