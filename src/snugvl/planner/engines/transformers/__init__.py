"""Hugging Face transformers to the planner: its rules, and where its layers are placed."""
