"""Our engine behind the protocol: its allocation, its thread, and kernels that are compiled beside it."""
