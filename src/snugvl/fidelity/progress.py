"""How far a comparison is, and how long it will take: by what is still to be read, corrected as it goes.

Nearly all the time goes into reading weights and computing beside that, so work is counted in bytes of files.
How fast they come is measured at the start, on one layer on its way from the disk to the device; what is seen
later counts instead. Answering takes as long for the next variant as it did for the last one.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

Tell = Callable[[str, str, float, float | None], None]
"""Told the stage, what of it is done, how much of all is done (0 to 1), and seconds left, where known."""

EVERY_S: Final = 0.2  # between two reports


@dataclass(slots=True)
class _Stage:
    nbytes: int
    done: int = 0
    answers: int = 0


class Clock:
    """Knows the stages that are left. Not thread-safe.

    Attributes:
        seconds: since it was made.
    """

    def __init__(
        self, stages: Mapping[str, int], tell: Tell, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`stages`: bytes that each reads at most."""
        self._stages = {name: _Stage(nbytes) for name, nbytes in stages.items()}
        self._tell, self._now = tell, now
        self._rate: float | None = None  # bytes a second, as measured first
        self._read, self._reading_s = 0, 0.0
        self._answers, self._answering_s = 0, 0.0
        self._stage: _Stage | None = None
        self._text, self._detail = "", ""
        self._since, self._told = now(), -math.inf
        self._began = now()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._now() - self._began

    def measured(self, nbytes: int, seconds: float) -> None:
        """So fast came the first bytes."""
        self._rate = nbytes / max(seconds, 1e-6)

    def begin(self, name: str, text: str, answers: int = 0) -> None:
        """A stage begins, which first reads; `answers`: that it makes then."""
        self._stage = self._stages.setdefault(name, _Stage(0))
        self._stage.answers = answers
        self._text, self._detail, self._since = text, "", self._now()
        self._report(at_once=True)

    def read(self, nbytes: int) -> None:
        """So many bytes more came; before the first stage they count for nothing."""
        if self._stage is None:
            return
        now = self._now()
        self._stage.done += nbytes
        self._read += nbytes
        self._reading_s += now - self._since
        self._since = now
        self._report()

    def answered(self, detail: str) -> None:
        """One answer more is there."""
        assert self._stage is not None, "a stage has begun"
        now = self._now()
        self._answers += 1
        self._stage.answers -= 1
        self._answering_s += now - self._since
        self._since, self._detail = now, detail
        self._report()

    def end(self, name: str) -> None:
        """A stage is over, or was found done."""
        stage = self._stages.setdefault(name, _Stage(0))
        stage.nbytes, stage.answers = stage.done, 0

    @property
    def left_s(self) -> float | None:
        """Seconds to the end; None where nothing was seen yet."""
        left = sum(max(stage.nbytes - stage.done, 0) for stage in self._stages.values())
        rate = self._read / self._reading_s if self._read and self._reading_s > 1 else self._rate
        if rate is None:
            return None
        answers = sum(stage.answers for stage in self._stages.values())
        each = self._answering_s / self._answers if self._answers else 0.0
        return left / rate + answers * each

    def _report(self, *, at_once: bool = False) -> None:
        now = self._now()
        if not at_once and now - self._told < EVERY_S:
            return
        self._told = now
        total = sum(stage.nbytes for stage in self._stages.values())
        done = sum(stage.done for stage in self._stages.values())
        self._tell(self._text, self._detail, min(done / total, 1.0) if total else 0.0, self.left_s)
