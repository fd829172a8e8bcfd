"""One step as `scheduler.py` decided it: parts of sequences, and what is copied before them."""

from dataclasses import dataclass, field

from snugvl.engine.blocks import BlockCopy
from snugvl.engine.checkpoints import StateCopy
from snugvl.engine.drafts import DeviceDrafts
from snugvl.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … end - 1` of a sequence, to be computed in this step; the last may be guessed: `drafts`.

    `unseen`: where the drafts are that the host doesn't know; zeros stand for them.
    `landing`: tokens of the sequence behind which its recurrent state is left on the way; 0 for nowhere.
    `again`: tokens before the drafts that come again in the next step, for a checkpoint before them.
    """

    sequence: Sequence
    start: int
    end: int
    landing: int = 0
    drafts: tuple[int, ...] = ()
    again: int = 0
    unseen: DeviceDrafts | None = None

    @property
    def unsure(self) -> int:
        """Its last tokens, which its recurrent state doesn't take in."""
        return self.again + len(self.drafts)

    def settle(self) -> None:
        """It has started."""
        each = self.sequence
        each.computed, each.lag = self.end - self.unsure, self.again
        if self.start <= each.foreseen:  # the last entry is wrong where the next token isn't known
            each.foreseen = max(each.foreseen, each.read - self.samples)

    @property
    def samples(self) -> bool:
        """Whether its last logits choose the next token: all known tokens are computed then.

        It ends beyond them where the host has not read its last one.
        """
        return self.end >= self.sequence.length

    @property
    def logits(self) -> int:
        """Its last rows, whose logits are wanted: what follows the newest token, and each draft."""
        return 1 + len(self.drafts) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Attributes:
        copies: come first, in their order.
        restores: slots that become copies of checkpoints, before anything is computed.
        later: the chunk that was left out, if there is one, because its images aren't encoded.
        alone: whether it must run with as little memory as can be (see `oom.py`).
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[StateCopy] = field(default_factory=list)
    later: list[Chunk] = field(default_factory=list)
    alone: bool = False

    @property
    def tokens(self) -> int:
        """Tokens in the step."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)

    def settle(self) -> None:
        """It has started: what comes after it may count on it."""
        for chunk in self.chunks:
            chunk.settle()

    @property
    def decodes(self) -> bool:
        """Whether only generated tokens are computed, of each sequence all, and nobody needs all memory.

        The last token of a prompt is no such token, though it may be all that a prefill has left: it can be a
        placeholder, and the siblings of its sequence wait for its logits.
        """
        return not self.alone and all(
            chunk.samples and chunk.start >= len(chunk.sequence.prompt) for chunk in self.chunks
        )

    @property
    def single_tokens(self) -> bool:
        """Whether it decodes, one token of each sequence."""
        return self.decodes and all(chunk.end - chunk.start == 1 for chunk in self.chunks)

    @property
    def sees_on(self) -> bool:
        """Whether a prompt goes on with a picture after the step: its encoding is held until then."""
        return any(
            chunk.sequence.prompt.placeholders_in(chunk.end, chunk.sequence.length) for chunk in self.chunks
        )
