"""The planner: which way to run a model fits a machine, its memory by component, and reports. No I/O here."""
