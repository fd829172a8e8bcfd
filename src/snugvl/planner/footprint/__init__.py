"""The bytes of a way to run a model: one documented function per component, and their sum."""
