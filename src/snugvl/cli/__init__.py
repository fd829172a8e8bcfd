"""The command line: a command with its view is a module, which parses, calls and prints.

Nothing here imports torch, Pillow or pydantic before a command runs, so that `--help` answers at once.
"""
