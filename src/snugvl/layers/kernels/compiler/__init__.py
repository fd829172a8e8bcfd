"""Compiling kernels ahead of time, finding them again, and launching them."""
