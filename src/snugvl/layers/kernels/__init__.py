"""Triton kernels, each beside the plain torch that says what it computes. Imported on a GPU only."""
