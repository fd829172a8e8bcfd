"""Attacks on a server, and what they do to others who use it; not run by pytest: `bystander.py`."""
