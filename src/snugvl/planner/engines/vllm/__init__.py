"""vLLM to the planner: its rules, footprint, tensors, cache blocks, and flags."""
