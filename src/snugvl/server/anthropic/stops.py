"""Which stop sequence ended an answer.

Anthropic's API tells it, the engine's deltas don't. So these requests go to the engine without their stop
sequences, and what it would do with them is done here: the sequence that is complete first ends the answer
(of several at once, the longest), and no character of it is shown.
"""

from collections.abc import Sequence


class StopMatcher:
    """Text in, text that is certain out. `matched` is the sequence that ended it."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences = sequences
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now; nothing after a match."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        # Earliest end first, then the longest.
        ends = [(at + len(s), -len(s), s) for s in self._sequences if (at := pending.find(s)) >= 0]
        if ends:
            end, _, self.matched = min(ends)
            self._held = ""
            return pending[: end - len(self.matched)]
        kept = max((_overlap(pending, sequence) for sequence in self._sequences), default=0)
        cut = len(pending) - kept
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, sequence: str) -> int:
    """Characters at the end of `text` that `sequence` begins with, fewer than all of it."""
    longest = min(len(text), len(sequence) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sequence[:n])), 0)
