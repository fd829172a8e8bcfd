"""Anthropic's API over a real socket."""
