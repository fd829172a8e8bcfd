"""Blocks of the KV cache: who has them, who shares them, and what happens when memory is short."""
