"""What memory is there: probed on this machine, described by the user, or replayed from a recording."""
