"""Tests of the server: a real socket, pocket behind it."""
