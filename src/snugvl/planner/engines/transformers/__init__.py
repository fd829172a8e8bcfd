"""The planner's knowledge of Hugging Face transformers: its rules, and where its layers are placed."""
