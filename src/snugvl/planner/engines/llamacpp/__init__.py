"""The planner's knowledge of llama.cpp: its rules, footprint, speed and flags."""
