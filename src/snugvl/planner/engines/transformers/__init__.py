"""What the planner knows of Hugging Face transformers: its rules, and where its layers are placed."""
