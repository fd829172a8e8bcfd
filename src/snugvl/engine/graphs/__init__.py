"""Work that comes again in the same size, captured as CUDA graphs."""
