"""Ollama's API over a real socket."""
