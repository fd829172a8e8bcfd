"""Steps with guesses start before the tokens of the ones before are told, and lose nothing on the way."""

import pytest

from snugvl.engine import speculation
from snugvl.engine.engine import Engine
from snugvl.engine.request import TokenOutput
from tests.engine.eager import engine_with, finish
from tests.engine.test_speculation import REQUESTS, SIZES, Prophet, known, quoting, right, sorted_out
from tests.engine.toy import Toy


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Engine:
    known()
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    return engine_with(True, Toy(), speculation="ngram", **SIZES)[0]


def until_guesses(engine: Engine) -> list[TokenOutput]:
    """Steps until one with guesses is under way."""
    outputs: list[TokenOutput] = []
    while engine._in_flight is None or engine._in_flight.runs_ahead:
        outputs += engine.step()
    return outputs


def test_the_next_step_has_started_when_tokens_are_told(here: Engine) -> None:
    here.add(REQUESTS[0]())
    outputs, ahead = until_guesses(here), 0
    while here.has_work:
        told = here.step()
        here.check_integrity()
        assert told, "a call tells the tokens of a step"
        ahead += here._in_flight is not None and not here._in_flight.runs_ahead
        outputs += told
    assert ahead >= 4
    assert sorted_out(outputs) == {("greedy", 0): right()["greedy", 0]}


def test_a_prompt_waits_until_tokens_are_told(here: Engine) -> None:
    here.add(REQUESTS[0]())
    outputs = until_guesses(here)
    here.add(REQUESTS[3]())
    told = here.step()
    assert {each.request_id for each in told} == {"greedy"}
    assert here._in_flight is None, "its step is read in the same breath"
    found = finish(here, outputs + told)
    assert found["greedy", 0][:-1] == [line[0] for line in right()["greedy", 0]]  # type: ignore[index]
    assert found["filtered", 0][:-1] == [line[0] for line in right()["filtered", 0]]  # type: ignore[index]


def test_who_is_aborted_meanwhile_gets_nothing_more(here: Engine) -> None:
    here.add(REQUESTS[0]())
    here.add(REQUESTS[3]())
    outputs = until_guesses(here)
    drafted = here.stats.drafted_tokens
    here.abort("greedy")
    here.check_integrity()
    told = here.step()
    here.check_integrity()
    assert {each.request_id for each in told} == {"filtered"}
    outputs += told
    while here.has_work:
        outputs += here.step()
    assert sorted_out(outputs)["filtered", 0] == right()["filtered", 0]
    assert here.stats.drafted_tokens > drafted
    assert here.stats.drafted_tokens == sum(each.accepted + each.rejected for each in outputs)
    assert here.stats.free_blocks == SIZES["num_blocks"]


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_step_that_nobody_waits_for_is_forgotten(here: Engine, how: str) -> None:
    here.add(REQUESTS[0]())
    until_guesses(here)
    ended = here.abort("greedy") if how == "abort" else here.reset()
    assert [each.finish for each in ended] == ["abort" if how == "abort" else "error"]
    assert not here.has_work
    here.check_integrity()
    here.add(quoting("filtered", [3, 1], temperature=1.3, seed=5, top_p=0.9, top_k=9, min_p=0.01))
    outputs: list[TokenOutput] = []
    while here.has_work:
        outputs += here.step()
        here.check_integrity()
    assert sorted_out(outputs)["filtered", 0] == right()["filtered", 0]
