"""Building blocks of the networks, in plain torch. Triton kernels come beside them in `kernels/`."""
