"""What the planner knows of vLLM: its footprint, its speed, its command."""
