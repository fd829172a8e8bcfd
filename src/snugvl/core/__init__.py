"""Nouns that every room shares."""
