"""What one request was like, in seconds from the start of its level."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

CountedBy = Literal["usage", "pieces"]


@dataclass(frozen=True, slots=True)
class Record:
    """One request.

    Attributes:
        sent_s: when its first byte was about to leave.
        ended_s: when the last byte of its answer was there, or when it failed.
        pieces_s: when each piece of the answer came; a piece is a token, or several.
        finished_s: when the server said that the answer is whole: later than the last piece where the last
            tokens have no text.
        output_tokens: by the server's count, or else the number of pieces (`counted_by`).
        error: None, or a short code such as "429 queue_full"; `message` is what the server said.
    """

    sent_s: float
    ended_s: float
    pieces_s: tuple[float, ...] = ()
    finished_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = "pieces"
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending to the first piece."""
        return self.pieces_s[0] - self.sent_s if self.pieces_s else None

    @property
    def latency_s(self) -> float:
        """Seconds from sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between one piece and the next."""
        return tuple(after - before for before, after in pairwise(self.pieces_s))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, per second from the first piece to the end of the answer."""
        if not self.pieces_s or self.output_tokens < 2:
            return None
        end = self.finished_s if self.finished_s is not None else self.pieces_s[-1]
        seconds = end - self.pieces_s[0]
        return (self.output_tokens - 1) / seconds if seconds > 0 else None
