"""Settings of a vLLM server, started or attached to."""

from dataclasses import dataclass
from typing import Literal

from snugvl.backends.child.settings import ChildChoice
from snugvl.errors import RequestError


@dataclass(frozen=True, slots=True)
class VllmChoice(ChildChoice):
    """A vLLM to launch, or with `attach` one that runs already: see `ChildChoice`.

    Attributes:
        sleep_after_s: seconds without a request after which the GPU's memory is given back; None: never.
        sleep_level: 1 keeps the weights in host memory; 2 drops them, and waking reads them again.

    Raises:
        RequestError: settings that contradict each other.
    """

    sleep_after_s: float | None = None
    sleep_level: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        self.check("vLLM", chosen=bool(self.sleep_after_s))
        if self.sleep_after_s is not None and self.sleep_after_s <= 0:
            raise RequestError(
                f"seconds until vLLM sleeps are more than 0, not {self.sleep_after_s:g}",
                field="sleep_after_s",
            )
