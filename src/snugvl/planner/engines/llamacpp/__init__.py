"""What the planner knows of llama.cpp: its footprint, its speed, its command."""
