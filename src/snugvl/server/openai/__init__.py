"""OpenAI: chat completions, completions, responses."""
