"""The planner's knowledge of vLLM: its rules, footprint, tensors, cache blocks and flags."""
