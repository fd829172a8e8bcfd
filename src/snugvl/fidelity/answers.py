"""The greedy answers of a variant: as its engine gives them, from their beginning or behind given tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, TokenOutput, VisionItem
from snugvl.engine.sampling.grammar import GrammarState, TokenGrammar
from snugvl.errors import SnugvlError

IN_FLIGHT: Final = 16  # requests that the engine knows of, and whose pictures are in memory


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """An answer to make.

    Attributes:
        number: of the question, by which the answer is known.
        prefix: tokens that the answer begins with; `max_tokens` of new ones follow at most.
    """

    number: int
    prompt_ids: tuple[int, ...]
    vision: tuple[VisionItem, ...]
    max_tokens: int
    grammar: TokenGrammar | None = None
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """New tokens of an answer, the one that ends it included; or why there is none."""

    number: int
    tokens: tuple[int, ...]
    error: SnugvlError | None = None


def answers(engine: Engine, wanted: Iterable[Wanted], ends: frozenset[int]) -> Iterator[Answered]:
    """The likeliest tokens, request by request as they finish; `ends`: tokens that end an answer."""
    waiting = iter(wanted)
    running: dict[str, tuple[Wanted, list[int]]] = {}
    left = True
    while left or running:
        while left and len(running) < IN_FLIGHT:
            each = next(waiting, None)
            if each is None:
                left = False
                break
            try:
                engine.add(_request(each, ends))
            except SnugvlError as error:
                yield Answered(each.number, (), error)
            else:
                running[str(each.number)] = (each, [])
        for output in engine.step() if running else ():
            if (done := _taken(output, running)) is not None:
                yield done


def _request(wanted: Wanted, ends: frozenset[int]) -> EngineRequest:
    return EngineRequest(
        str(wanted.number),
        (*wanted.prompt_ids, *wanted.prefix),
        SamplingParams(max_tokens=wanted.max_tokens),
        wanted.vision,
        stop_ids=ends,
        grammar=None if wanted.grammar is None else _Begun(wanted.grammar, wanted.prefix),
    )


def _taken(output: TokenOutput, running: dict[str, tuple[Wanted, list[int]]]) -> Answered | None:
    """The answer, where an output ends it."""
    wanted, tokens = running[output.request_id]
    if output.token_id is not None:
        tokens.append(output.token_id)
    if output.finish is None:
        return None
    del running[output.request_id]
    return Answered(wanted.number, tuple(tokens), output.error)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A grammar of which an answer has taken some tokens already."""

    grammar: TokenGrammar
    prefix: Sequence[int]

    def start(self) -> GrammarState:
        state = self.grammar.start()
        for token in self.prefix:
            state.accept(token)
        return state
