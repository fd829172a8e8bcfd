"""What the planner knows of transformers: its footprint, its speed, its command."""
