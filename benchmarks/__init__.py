"""Comparisons with PyTorch and measurements; see `make bench`."""
