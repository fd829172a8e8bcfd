"""snugvl's own engine to the planner: its rules, footprint, formats, and snapshots of states."""
