"""Why a model, an engine or more of something is not in a plan."""

from dataclasses import dataclass

from snugvl.core.options import Engine
from snugvl.core.sizes import format_size


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an engine can't run a model, isn't chosen for it, or has no room for what was tried.

    Attributes:
        text: the reason as a clause; where `short_bytes` isn't 0, the thing that was tried, such as
            "16,384-token images (16.8 megapixels)".
        model: its name; empty where it is the chosen one, or one that the caller knows.
        short_bytes: bytes of memory missing, or 0 where memory isn't the reason.
        blame: name and bytes of the largest component that could shrink, else of the largest one.
        remedy: a change that was tried and fits, as a clause, or None.
    """

    engine: Engine
    text: str
    model: str = ""
    short_bytes: int = 0
    blame: str = ""
    blame_bytes: int = 0
    remedy: str | None = None

    def __str__(self) -> str:
        if not self.short_bytes:
            return self.text
        why = f"{self.blame} would take {format_size(self.blame_bytes)} alone"
        line = f"{self.text}: {format_size(self.short_bytes)} too much ({why})"
        return f"{line}; {self.remedy}" if self.remedy else line
