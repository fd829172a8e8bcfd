"""An engine in a process of its own, which is watched, and started again when it dies."""
