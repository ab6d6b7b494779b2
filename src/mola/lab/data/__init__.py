"""Data sets as tensors: labelled images, their shifts, and what lies outside them."""
