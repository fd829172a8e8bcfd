"""Requests to an engine: what an answer begins with is in its prompt, and its grammar has seen it."""

from collections.abc import Iterator

import pytest
import torch

from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.errors import RequestTooLarge
from snugvl.fidelity import stages
from snugvl.fidelity.stages import Answered, Wanted
from tests.fidelity.test_distributions import Digits


class Counting:
    """An engine that answers with the number of its request and an end, and refuses long prompts."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.most = 0
        self._running: list[str] = []

    def add(self, request: EngineRequest) -> None:
        if len(request.prompt_ids) > 8:
            raise RequestTooLarge("too long")
        self.requests.append(request)
        self._running.append(request.request_id)
        self.most = max(self.most, len(self._running))

    def step(self) -> list[TokenOutput]:
        name = self._running.pop()
        return [TokenOutput(name, 0, int(name)), TokenOutput(name, 0, 99, finish="stop")]


def test_answers_go_on_behind_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.fidelity.stages.IN_FLIGHT", 3)
    engine, taken = Counting(), []

    def wanted() -> Iterator[Wanted]:
        for number in range(8):
            taken.append(number)
            assert len(taken) - len(found) <= 3 + 1  # pictures of those that wait are not in memory
            yield Wanted(number, (5,) * (9 if number == 4 else 4), (), 7, Digits(), (1, 2))  # type: ignore[arg-type]

    found: list[Answered] = []
    found.extend(stages.answers(engine, wanted(), frozenset({99})))  # type: ignore[arg-type]
    assert {each.number: each.tokens for each in found if each.error is None} == {
        number: (number, 99) for number in range(8) if number != 4
    }
    assert [type(each.error) for each in found if each.error is not None] == [RequestTooLarge]
    assert engine.most == 3
    request = engine.requests[0]
    assert request.prompt_ids == (5, 5, 5, 5, 1, 2)
    assert (request.sampling.max_tokens, request.sampling.greedy, request.stop_ids) == (7, True, {99})
    bits = torch.zeros(1, dtype=torch.int32)
    assert request.grammar is not None
    request.grammar.start().fill(bits)
    assert bits.tolist() == [1 << 3]
