"""One pass over a network that is read layer by layer, for many prompts and answers at once.

    for each layer:  its weights from disk ─► for each prompt: its chunks, then each answer behind it

So the files are read once, however many tokens there are. The hidden states of all tokens wait for the next
layer; keys and values are held for one layer and one sequence:

    prompt        [ chunk │ chunk │ … ]                  keys and values 0 … P − 1
    answers                            [ answer 0 ]      P …, over and over: each sees the prompt and itself
                                       [ answer 1 ]

A recurrent state is kept behind the prompt, and every answer starts from it.

The result is the last hidden states, after the norm, at the places where the answers' tokens are chosen: 8
KiB a token of an 8B model, from which `distributions.py` makes logits.

A visitor of the layers may change one before it is computed, or compute it for some sequences alone.

A chunk that runs out of memory is computed again in two halves.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch

from snugvl.checkpoint.architecture import TextConfig
from snugvl.core.config import DEFAULT_BLOCK_SIZE, KVFormat
from snugvl.engine.batch import table_width
from snugvl.engine.request import CheckedPrompt, VisionItem
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.device import out_of_memory, release
from snugvl.models.batch import encoded
from snugvl.models.decoder import Layer, cache_of
from snugvl.models.layered import LayeredNetwork
from snugvl.models.rope import rotation_of

LEAST_CHUNK: Final = 64  # tokens: one that doesn't fit is not a matter of its length
BEHIND_PROMPT, BEFORE_CHUNK = 0, 1  # checkpoints of a recurrent state
Answers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """A prompt and the answers that are tried behind it, each of one token at least."""

    prompt: CheckedPrompt
    answers: Answers

    @property
    def lengths(self) -> list[int]:
        """Computed tokens: the prompt's, then each answer's but its last, which chooses nothing."""
        return [len(self.prompt), *(len(answer) - 1 for answer in self.answers)]

    @property
    def tokens(self) -> int:
        """Number of computed tokens of prompt and answers together."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return len(self.prompt) + max((len(answer) - 1 for answer in self.answers), default=0)


@dataclass(frozen=True, slots=True)
class SweepSizes:
    """Sizes and places of a pass.

    Attributes:
        chunk: tokens that are computed at once.
        kv: format of keys and values.
        home: device on which hidden states wait.
    """

    chunk: int
    kv: KVFormat
    home: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Rows `first … last - 1` of the hidden states: tokens `start …` of a sequence of `group`."""

    group: Sequences
    first: int
    last: int
    start: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def halves(self) -> tuple["_Chunk", "_Chunk"]:
        middle = self.first + self.size // 2
        before = _Chunk(self.group, self.first, middle, self.start)
        return before, _Chunk(self.group, middle, self.last, self.start + middle - self.first)


class Sweep:
    """A pass for some sequences. `computed`: range of tokens, of the present prompt or answer, that a layer
    computes at the moment."""

    def __init__(self, network: LayeredNetwork, groups: Sequence[Sequences], sizes: SweepSizes) -> None:
        self._network, self._groups, self._sizes = network, groups, sizes
        self._text: TextConfig = network.model.config.text
        vision = network.model.config.vision
        self._levels = 0 if vision is None else len(vision.deepstack_layers)
        self._keep, self.computed = True, slice(0)
        self._encoded: dict[bytes, torch.Tensor] = {}  # of pictures, on the host
        total = sum(group.tokens for group in groups)
        hidden = self._text.hidden_size
        self._states = torch.empty(total, hidden, dtype=network.dtype, device=sizes.home)
        blocks = -(-max(group.longest for group in groups) // DEFAULT_BLOCK_SIZE)
        # Keys and values of one layer, and one recurrent state with its copies.
        self._cache = cache_of(
            self._text, network.dtype, network.device, blocks, fp8=sizes.kv == "fp8", snapshots=2, whole=False
        )
        self._starts = [0, *accumulate(group.tokens for group in groups)]

    @torch.inference_mode()
    def run(self, visit: Callable[[int, Layer], None] | None = None) -> list[list[torch.Tensor]]:
        """Run the pass; returns the last hidden states, per group and answer `[tokens, hidden]` on the host.

        `visit`: called with each layer while its weights are in memory; it computes the layer by `advance`.
        """
        network, decoder = self._network, self._network.model.decoder
        parts: list[Layer] = list(decoder.layers)  # type: ignore[arg-type]
        self._encode()
        network.read_ahead(parts[0])
        self._begin()
        for index, layer in enumerate(parts):
            with network.part(layer), ExitStack() as places:
                if index + 1 < len(parts):
                    network.read_ahead(parts[index + 1])
                places.callback(_placed(layer))
                if visit is None:
                    self.advance(index, layer)
                else:
                    visit(index, layer)
        with network.part(decoder.norm):
            return [
                self._wanted(group, first) for group, first in zip(self._groups, self._starts, strict=False)
            ]

    def advance(
        self, index: int, layer: Layer, numbers: Sequence[int] | None = None, *, keep: bool = True
    ) -> None:
        """Compute a layer for all sequences, or for these groups; `keep` False drops the result."""
        self._keep = keep
        for number in range(len(self._groups)) if numbers is None else numbers:
            self._advance(index, layer, self._groups[number], self._starts[number])

    def repeat(self, source: int, target: int) -> None:
        """Copy the hidden states of a group to another, equal one."""
        first, second, tokens = self._starts[source], self._starts[target], self._groups[source].tokens
        self._states[second : second + tokens] = self._states[first : first + tokens]

    def _encode(self) -> None:
        """Encode the pictures with the vision tower, each once."""
        items: dict[bytes, VisionItem] = {
            item.digest: item for group in self._groups for item in group.prompt.vision
        }
        tower = self._network.model.tower
        if not items or tower is None:
            return
        with self._network.part(tower):
            for digest, item in items.items():
                read = item.reader(self._network.device, self._network.dtype)
                rows = encoded(self._network.model.encode_in_steps(read, item.grid_thw))
                self._encoded[digest] = rows.cpu()
                del rows
        release(self._network.device)  # the tower's one piece, which no layer would fill

    def _begin(self) -> None:
        """Make the embeddings of all tokens, with pictures' encodings in place of their placeholders."""
        size, width = self._sizes.chunk, self._text.hidden_size
        for group, start in zip(self._groups, self._starts, strict=False):
            ids = torch.tensor([*group.prompt.ids, *(t for answer in group.answers for t in answer[:-1])])
            for first in range(0, len(ids), size):
                rows = self._network.embed(ids[first : first + size])
                self._states[start + first : start + first + len(rows)] = rows
            rows = torch.tensor(group.prompt.placeholders, dtype=torch.int64)
            if len(rows):
                whole = self._pictured(group.prompt, 0, len(group.prompt))[:, :width]
                self._states[(rows + start).to(self._states.device)] = whole.to(self._states)

    def _pictured(self, prompt: CheckedPrompt, start: int, end: int) -> torch.Tensor:
        """Rows of encodings that tokens `start … end - 1` stand for, on the host."""
        parts = prompt.vision_in(start, end)
        return torch.cat([self._encoded[part.item.digest][part.start : part.end] for part in parts])

    def _advance(self, index: int, layer: Layer, group: Sequences, first: int) -> None:
        """Compute a layer for a prompt and all of its answers."""
        states = self._cache.states
        bounds = pairwise(accumulate(group.lengths, initial=first))
        for number, (begin, end) in enumerate(bounds):
            at = 0 if number == 0 else len(group.prompt)
            if number > 1 and states is not None:
                states.restore(0, BEHIND_PROMPT)
            for row in range(begin, end, self._sizes.chunk):
                last = min(row + self._sizes.chunk, end)
                self._compute(index, layer, _Chunk(group, row, last, at + row - begin))
            if number == 0 and states is not None:
                states.save(0, BEHIND_PROMPT)

    def _compute(self, index: int, layer: Layer, chunk: _Chunk) -> None:
        """Compute a layer for a chunk, in halves where it doesn't fit.

        Raises:
            RuntimeError: out of memory with so few tokens that their number is not to blame.
        """
        states = self._cache.states
        if states is not None:
            states.save(0, BEFORE_CHUNK)
        try:
            self._try(index, layer, chunk)
            return
        except Exception as error:
            if not out_of_memory(error) or chunk.size <= LEAST_CHUNK:
                raise
        release(self._network.device)  # here the error, and what it held, are gone
        if states is not None:
            states.restore(0, BEFORE_CHUNK)
        for half in chunk.halves():
            self._compute(index, layer, half)

    def _try(self, index: int, layer: Layer, chunk: _Chunk) -> None:
        prompt, device = chunk.group.prompt, self._network.device
        rows = slice(chunk.first, chunk.last)
        x = self._states[rows].to(device, copy=True)  # a layer may write over what it is given
        end = chunk.start + chunk.size
        self.computed = slice(chunk.start, end)
        rotation = rotation_of(_positions(prompt, chunk.start, end).to(device), self._text.rope, x.dtype)
        x = layer(x, rotation, self._cache, self._metadata(chunk.start, end))
        places = prompt.placeholders_in(chunk.start, end) if index < self._levels else ()
        if places:
            width = self._text.hidden_size
            level = self._pictured(prompt, chunk.start, end)[:, (index + 1) * width : (index + 2) * width]
            where = torch.tensor(places, device=device) - chunk.start
            x.index_add_(0, where, level.to(device, x.dtype))
        if self._keep:
            self._states[rows] = x

    def _wanted(self, group: Sequences, first: int) -> list[torch.Tensor]:
        """The last norm of the states that choose the answers' tokens."""
        norm, device = self._network.model.decoder.norm, self._network.device
        found, start, last = [], first + len(group.prompt), first + len(group.prompt) - 1
        for length in group.lengths[1:]:
            rows = torch.cat((self._states[last : last + 1], self._states[start : start + length]))
            found.append(norm(rows.to(device)).cpu())
            start += length
        return found

    def _metadata(self, start: int, end: int) -> AttentionMetadata:
        """Attention's metadata of a chunk of the only sequence, whose blocks are in order."""
        device = self._network.device
        blocks = table_width(-(-end // DEFAULT_BLOCK_SIZE))
        table = torch.arange(blocks, dtype=torch.int32, device=device).clamp_(max=self._cache.num_blocks - 1)
        metadata = AttentionMetadata(
            query_lens=(end - start,),
            context_lens=(end,),
            slot_mapping=torch.arange(start, end, device=device),
            block_tables=table[None],
            block_size=DEFAULT_BLOCK_SIZE,
            state_slots=None
            if self._cache.states is None
            else torch.zeros(1, dtype=torch.int64, device=device),
        )
        return metadata.on_device() if device.type == "cuda" else metadata


def _placed(layer: Layer) -> Callable[[], None]:
    """Let a layer use the first place of a cache, as its only one; returns a function that undoes it."""
    attention = layer.linear_attn if layer.linear else layer.self_attn
    before = attention.layer
    attention.layer = 0

    def undo() -> None:
        attention.layer = before

    return undo


def _positions(prompt: CheckedPrompt, start: int, end: int) -> torch.Tensor:
    """M-RoPE positions `[3, end - start]`: the prompt's own, then counted on."""
    own = prompt.positions[:, start:end]
    first = max(start, len(prompt))
    more = torch.arange(first, max(end, first)) + prompt.delta
    return torch.cat((own, more.expand(3, -1)), dim=1)
