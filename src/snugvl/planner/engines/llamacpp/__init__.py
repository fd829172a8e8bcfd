"""llama.cpp to the planner: its rules, footprint, speed, and flags."""
