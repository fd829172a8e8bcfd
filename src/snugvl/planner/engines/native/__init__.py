"""What the planner knows of snugvl's own engine: its footprint, its speed, its command."""
