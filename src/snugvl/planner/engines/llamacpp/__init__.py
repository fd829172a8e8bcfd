"""What the planner knows of llama.cpp: its rules, footprint, speed and flags."""
