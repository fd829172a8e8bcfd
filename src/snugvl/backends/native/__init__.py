"""Our engine behind the protocol: what it allocates, its thread, and what is compiled beside it."""
