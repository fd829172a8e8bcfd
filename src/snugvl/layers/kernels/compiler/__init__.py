"""How kernels are compiled, found again and launched."""
