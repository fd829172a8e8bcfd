"""What the planner knows of vLLM: its rules, footprint, tensors, cache blocks and flags."""
