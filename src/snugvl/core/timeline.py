"""The time line of a start: the steps that a process has reached on its way to the first answer, and when.

A step is a record of the logger "snugvl.start" at DEBUG; a `Recorder` collects them.
"""

import logging

Timeline = tuple[tuple[str, float], ...]
"""Steps with the `time.time()` at which each was reached, in order."""

logger = logging.getLogger("snugvl.start")


def mark(step: str) -> None:
    """Note that `step` is reached now."""
    logger.debug("%s", step)


class Recorder(logging.Handler):
    """Collects all marks of this process from now on."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._steps: list[tuple[str, float]] = []
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # they are not for the terminal
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one mark, as logging calls it."""
        self._steps.append((record.getMessage(), record.created))

    @property
    def timeline(self) -> Timeline:
        """The marks so far: (step, `time.time()` seconds) each, in their order."""
        return tuple(self._steps)
