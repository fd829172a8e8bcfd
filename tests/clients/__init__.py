"""Clients that other people wrote, on our server."""
