"""Attention over the paged cache, and what writes it."""
