"""Anthropic: /v1/messages."""
