"""Ollama: /api/chat, /api/generate, /api/tags, /api/show."""
