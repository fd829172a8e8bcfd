"""What fits: a function per component of the footprint, the solver, the plan and its reports. No I/O here."""
