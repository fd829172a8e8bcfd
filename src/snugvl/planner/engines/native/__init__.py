"""What the planner knows of snugvl's own engine: its rules, footprint, formats and state snapshots."""
