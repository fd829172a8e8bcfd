"""Work that comes again in the same size, recorded as CUDA graphs."""
