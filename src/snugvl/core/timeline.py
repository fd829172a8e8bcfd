"""What a process has reached on its way to the first answer, and when.

A step is a record of the logger "snugvl.start" at DEBUG: whoever wants the time line listens there.
"""

import logging

Timeline = tuple[tuple[str, float], ...]
"""Steps with the `time.time()` at which each was reached, in order."""

logger = logging.getLogger("snugvl.start")


def mark(step: str) -> None:
    """Say that `step` is reached now."""
    logger.debug("%s", step)


class Recorder(logging.Handler):
    """Hears all marks of this process from now on."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._steps: list[tuple[str, float]] = []
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # they are not for the terminal
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """A mark."""
        self._steps.append((record.getMessage(), record.created))

    @property
    def timeline(self) -> Timeline:
        """The marks so far."""
        return tuple(self._steps)
