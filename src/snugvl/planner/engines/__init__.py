"""An engine a folder: what the planner knows of it."""
