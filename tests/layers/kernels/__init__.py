"""Kernels in Triton's interpreter against plain torch (on the GPU machine: compiled)."""
