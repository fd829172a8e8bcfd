"""Drafts of what a choice may say next; `speculation.py` computes it beside the newest token.

One proposer looks for an earlier place with the same tokens as the text's end, the longer the better.

    prompt   { "name" : "Ada" , "born" : 1815 } … Repeat it with another year.
    answer   { "name" : "Ada" , "bo
                                 └ "Ada" , "bo" stood in the prompt: rn " : 1815 } may follow

It costs no memory of the device, and pays where an answer quotes: OCR, JSON, code, boxes, tables. An index
knows where each pair of tokens stood last, and for each place where the same pair stood before that: the hash
chains of deflate (RFC 1951, section 4). So a token is added in constant time, and a look-up follows a few
places of a chain, however long the context is. It takes about 100 bytes of host memory a token.

The other one asks the model's own multi-token predictor (`predictor.py`), which runs on the device while the
host is busy with other things. Where the host needn't know the drafts the next step takes them from there.

Source: prompt lookup decoding, Saxena 2023 (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from snugvl.layers.device import HostCopy

PAIR = 2  # tokens of the shortest end that is looked for
LONGEST = 8  # of an end: a longer one says no more
PLACES = 8  # of a chain that are looked at
GROWTH = 1024  # tokens of a prompt that a look-up adds to its index: half a millisecond
REST = 32  # tokens at most for which a choice has no drafts whose last ones were wrong


class Proposer(Protocol):
    """Proposes drafts of a choice, from its prompt and its answer."""

    def propose(self, most: int) -> list[int]:
        """The next tokens, `most` at most; empty where it has no proposal."""


@dataclass(slots=True)
class Drafts:
    """The drafts of a choice, and how many: more after a hit, less after a miss.

    Attributes:
        proposer: drafts on the host; None: a draft model does on the device.
        width: drafts of its next step, at most.
        misses: steps in a row whose first draft was wrong.
        rest: tokens that it has when there are drafts again.
        entries: its first tokens, of each of which a draft model has keys and values.
        found: what a draft model was asked for last, behind its first `place` tokens.
    """

    proposer: Proposer | None = None
    width: int = 4
    misses: int = 0
    rest: int = 0
    entries: int = 0
    found: "DeviceDrafts | None" = None
    place: int = 0

    def propose(self, length: int, most: int, *, unseen: bool = False) -> list[int]:
        """Drafts behind `length` tokens, `most` at most.

        `unseen`: those on the device may stay there; zeros stand for them.
        """
        if length < self.rest:
            return []
        most = min(self.width, most)
        if self.proposer is not None:
            return self.proposer.propose(most)
        if self.found is None or not self.asked(length):
            return []
        return [0] * min(most, self.found.count) if unseen else list(self.found.read(most))

    def asked(self, length: int) -> bool:
        """Whether a draft model was asked for drafts after `length` tokens."""
        return self.found is not None and self.place == length

    def expect(self, found: "DeviceDrafts", length: int) -> None:
        """Note that a draft model was asked for drafts after `length` tokens, all read by it but the last."""
        self.found, self.place, self.entries = found, length, length - 1

    def on_device(self, length: int) -> "DeviceDrafts | None":
        """Drafts after `length` tokens on the device, or None where there are none."""
        return self.found if self.asked(length) and self.found is not None and self.found.count else None

    def read(self, start: int, end: int) -> None:
        """Note that the network, and so a draft model, has read tokens `start … end - 1` with known
        successors.

        Behind a gap the draft model has only their hidden states, so they don't count.
        """
        if start <= self.entries:
            self.entries = max(self.entries, end)

    def learn(self, length: int, drafted: int, accepted: int) -> None:
        """Adapt the width of drafts: `accepted` of `drafted` were right; there are `length` tokens now."""
        self.misses = 0 if accepted else self.misses + 1
        self.width = max(self.width, 2 * drafted) if accepted == drafted else accepted + 1
        if self.misses > 1:
            self.rest = length + min(1 << self.misses, REST)


class PendingDrafts:
    """Drafts of the predictor on their way to the host. `tokens`: `[rows, drafts]` int64 on the device, as
    long as they stand there."""

    def __init__(self, drafts: torch.Tensor) -> None:
        self.tokens: torch.Tensor | None = drafts
        self._found: list[list[int]] | None = None
        # Their place is written over by the next ones.
        self._copy = HostCopy(
            drafts, torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=drafts.is_cuda)
        )

    def of(self, row: int) -> list[int]:
        """Drafted tokens of a row; waits until the device has them."""
        if self._found is None:
            self._found = self._copy.read().tolist()
        return self._found[row]


@dataclass(frozen=True, slots=True)
class DeviceDrafts:
    """Drafts of one choice on the device: the first of a row of `found`."""

    found: PendingDrafts
    row: int

    @property
    def count(self) -> int:
        """Number of drafts."""
        return 0 if self.found.tokens is None else self.found.tokens.shape[1]

    def put(self, ids: torch.Tensor) -> None:
        """Write the first ones to `ids` `[n]` int64 of a step that starts now."""
        assert self.found.tokens is not None, "drafts that are gone"
        ids.copy_(self.found.tokens[self.row, : len(ids)])

    def read(self, count: int) -> tuple[int, ...]:
        """The first `count` drafts; waits until the device has them."""
        return tuple(self.found.of(self.row)[:count])


class NgramIndex:
    """An index of the places of token pairs in a list that may grow. A prompt's is shared by its choices."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._last: dict[int, int] = {}  # by pair, where its second token stood last
        self._before = array("i", [-1])  # by place, where the same pair stood before that; -1 for nowhere

    def grow(self, end: int, most: int = GROWTH) -> None:
        """Add the pairs before place `end`, `most` at most."""
        tokens, last, before = self.tokens, self._last, self._before
        for place in range(len(before), min(end, len(before) + most)):
            pair = _pair(tokens[place - 1], tokens[place])
            before.append(last.get(pair, -1))
            last[pair] = place

    def find(self, ends: Sequence[int]) -> tuple[int, int]:
        """Tokens of the longest end of `ends` that was found, and the place behind it; 0 tokens: nothing.

        Among equally long ones it is the latest.
        """
        if len(ends) < PAIR:
            return 0, 0
        tokens, most = self.tokens, min(len(ends), LONGEST)
        place, best, behind = self._last.get(_pair(ends[-2], ends[-1]), -1), 0, 0
        for _ in range(PLACES):
            if place < 0:
                break
            length = PAIR
            while length < min(most, place + 1) and tokens[place - length] == ends[-1 - length]:
                length += 1
            if length > best:
                best, behind = length, place + 1
            if length == most:
                break
            place = self._before[place]
        return best, behind


class NgramProposer:
    """Drafts of one choice by n-grams of its prompt and its own answer."""

    def __init__(self, prompt: NgramIndex, generated: list[int]) -> None:
        """`generated`: its answer, which grows."""
        self._prompt, self._generated = prompt, generated
        self._own = list(prompt.tokens[-LONGEST:])  # the answer, with what an end may begin with
        self._lead = len(self._own)
        self._index = NgramIndex(self._own)

    def propose(self, most: int) -> list[int]:
        """See `Proposer`."""
        own = self._own
        own += self._generated[len(own) - self._lead :]
        self._prompt.grow(len(self._prompt.tokens))
        self._index.grow(len(own) - 1, len(own))  # without the end itself
        ends = own[-LONGEST:]
        length, behind = self._index.find(ends)
        older, place = self._prompt.find(ends)
        if older > length and place < len(self._prompt.tokens):
            return list(self._prompt.tokens[place : place + most])
        if not length:
            return []
        drafted: list[int] = []
        for place in range(behind, behind + most):  # past its own end what repeats goes on repeating
            drafted.append(own[place] if place < len(own) else drafted[place - len(own)])
        return drafted


def _pair(first: int, second: int) -> int:
    return first << 32 | second
