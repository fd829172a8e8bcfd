"""The planner's knowledge of snugvl's own engine: its rules, footprint, formats and state snapshots."""
