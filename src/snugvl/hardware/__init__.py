"""Machines and their memory: probed here, described by the user, or replayed from a recording."""
