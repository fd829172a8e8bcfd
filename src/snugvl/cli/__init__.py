"""The command line: one small module a command, which parses, calls and prints.

Nothing here imports torch, Pillow or pydantic before a command runs, so that `--help` answers at once.
"""
