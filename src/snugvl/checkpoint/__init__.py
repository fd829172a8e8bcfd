"""Checkpoints: their configuration, headers, files, and where they come from. No torch in here."""
