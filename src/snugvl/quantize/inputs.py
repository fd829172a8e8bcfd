"""Calibration data of `snugvl quantize`: the user's pictures and texts, or tokens drawn at random."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from PIL import Image

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.engine.admission import check_prompt
from snugvl.engine.request import CheckedPrompt, EngineRequest
from snugvl.errors import InputError
from snugvl.fidelity.participant import Participant
from snugvl.fidelity.sweep import Sequences
from snugvl.fidelity.variants import Question

PIECE: Final = 512  # tokens of a text that are read together
MOST: Final = 32_768  # tokens in all
LEAST: Final = 16  # of a piece
RANDOM: Final = 4  # pieces of random tokens
PROBES: Final = 4  # pieces that costs are measured on
PROBE: Final = 32  # tokens of each


@dataclass(frozen=True, slots=True)
class Given:
    """The user's files: (name, function that opens it) of each picture, (name, text) of each text."""

    pictures: Sequence[tuple[str, Callable[[], Image.Image]]] = ()
    texts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationData:
    """The prompts that pass through the network.

    Attributes:
        prompts: sequences for which matrices are rounded.
        probe: sequences on which the costs of matrices are measured.
        own: whether the prompts are the user's, not random.
        left_out: number of tokens beyond `MOST`, which aren't used.
    """

    prompts: tuple[CheckedPrompt, ...]
    probe: Sequences
    own: bool
    left_out: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


def material_of(side: Participant, given: Given) -> CalibrationData:
    """Calibration data of the user's files; random tokens where none are given.

    Raises:
        InputError: pictures for a model that reads none, or texts that are all too short.
        ImageError: a picture can't be read.
    """
    config = side.config
    if given.pictures and config.vision is None:
        raise InputError(f"{side.capabilities.model} reads no pictures; give texts (.txt, .md)")
    pieces = [piece for _, text in given.texts for piece in _pieces(side, text)]
    seen = [side.prepared(Question("caption"), read()).prompt for _, read in given.pictures]
    if not pieces and not seen:
        if given.texts:
            raise InputError(f"the texts have fewer than {LEAST} tokens each; give longer ones, or pictures")
        drawn = _random(config)
        return CalibrationData(
            tuple(_checked(piece, config) for piece in drawn), _probe(drawn, config), own=False
        )
    prompts = [*seen, *(_checked(piece, config) for piece in pieces)]
    kept = _evenly(prompts)
    left_out = sum(map(len, prompts)) - sum(map(len, kept))
    return CalibrationData(kept, _probe(pieces or _random(config), config), own=True, left_out=left_out)


def _pieces(side: Participant, text: str) -> list[tuple[int, ...]]:
    ids = side.processor.tokenizer.encode(text)
    pieces = [tuple(ids[start : start + PIECE]) for start in range(0, len(ids), PIECE)]
    return [piece for piece in pieces if len(piece) >= LEAST]


def _random(config: ModelConfig) -> list[tuple[int, ...]]:
    """Pieces of random tokens, without those that stand for pictures."""
    chance = torch.Generator().manual_seed(0)
    drawn = torch.randint(config.text.vocab_size, (RANDOM, PIECE), generator=chance).tolist()
    return [tuple(token for token in piece if token not in config.placeholders) for piece in drawn]


def _checked(ids: tuple[int, ...], config: ModelConfig) -> CheckedPrompt:
    return check_prompt(EngineRequest("", ids), config)


def _evenly(prompts: Sequence[CheckedPrompt]) -> tuple[CheckedPrompt, ...]:
    """As many prompts as there is room for, evenly from all of them; one at least."""
    total = sum(map(len, prompts))
    if total <= MOST:
        return tuple(prompts)
    count = max(1, len(prompts) * MOST // total)
    return tuple(prompts[number * len(prompts) // count] for number in range(count))


def _probe(pieces: Sequence[tuple[int, ...]], config: ModelConfig) -> Sequences:
    """Middles of some pieces, each behind the first one's first token: chats all begin alike."""
    chosen = [pieces[number * len(pieces) // PROBES] for number in range(min(PROBES, len(pieces)))]
    starts = [max(1, (len(piece) - PROBE) // 2) for piece in chosen]
    middles = [piece[start : start + PROBE] for piece, start in zip(chosen, starts, strict=True)]
    first = next(chain.from_iterable(pieces))
    return Sequences(_checked((first,), config), tuple(dict.fromkeys(middles)))
