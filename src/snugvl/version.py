"""The version, in one place: packaging reads it from here."""

__version__ = "0.2.0"
