"""The plain loop is the oracle of the fast one: whatever comes and goes when, both give the same outputs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from snugvl.engine import runner, snapshots, speculation
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, TokenOutput
from snugvl.errors import RequestTooLarge
from tests.draws import draws
from tests.engine.eager import EagerGraphs, engine_with, request
from tests.engine.test_grammar import END, Rule, phrases
from tests.engine.toy import POISON, HybridToy, Toy
from tests.patience import PATIENCE_S

MODELS = {"attention": Toy(), "states": HybridToy()}
PROMPTS = ((3, 1, 4, 1, 5), (9,), (2, 7, 1, 8, 2, 8, 1, 8), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3), (1, POISON))
SAMPLING: tuple[dict[str, object], ...] = (
    {},
    {"stop_ids": [9, 5, 17]},
    {"n": 3, "temperature": 1.2, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.8, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"no_repeat_ngram_size": 2, "temperature": 1.0, "seed": 4},
    {"logprobs": 3, "n": 2},
)
REQUESTS = st.tuples(
    st.integers(0, len(PROMPTS) - 1), st.sampled_from([1, 2, 9, 24]), st.sampled_from(SAMPLING), st.booleans()
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("add"), REQUESTS),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 7), st.sampled_from([None, 0, 1]))),
    st.tuples(st.just("leave"), st.integers(0, 7)),
)
Script = list[tuple[str, object]]
Said = dict[tuple[str, int], tuple[list[object], str | None]]


class Often(speculation.NgramProposer):
    """Drafts after every token: what stood after the last one like it, or else that one again."""

    def propose(self, most: int) -> list[int]:
        ends = self._generated or [1]
        return super().propose(most) or ends[-1:] * min(most, 2)


def asked(name: str, which: int, count: int, sampling: dict[str, object], typed: bool) -> EngineRequest:
    each = request(name, list(PROMPTS[which]), **{"max_tokens": count, **sampling})
    return replace(each, grammar=Rule(phrases), stop_ids=each.stop_ids | {END}) if typed else each


def played(engine: Engine, script: Script) -> Said:
    """What each choice was given, with its log-probabilities, and why it ended.

    A client that leaves does so within a step, when the next one has started.
    """
    outputs: list[TokenOutput] = []
    names = 0

    def leaving(name: str) -> Callable[[], None]:
        return lambda: outputs.extend(engine.abort(name))

    for kind, value in script:
        if kind == "add":
            with suppress(RequestTooLarge):
                engine.add(asked(str(names), *value))  # type: ignore[misc]
            names += 1
        elif kind == "abort":
            outputs += engine.abort(str(value[0]), value[1])  # type: ignore[index]
        elif kind == "leave":
            outputs += engine.step(leaving(str(value)))
        else:
            for _ in range(value):  # type: ignore[call-overload]
                outputs += engine.step()
                engine.check_integrity()
        engine.check_integrity()
    steps = 2000
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
        steps -= 1
        assert steps, "the engine does not finish"
    said: Said = {}
    for each in outputs:
        tokens, end = said.get((each.request_id, each.choice), ([], None))
        assert end is None, "each choice ends once"
        if each.token_id is not None:
            tokens.append((each.token_id, each.logprob and round(each.logprob, 4), len(each.top_logprobs)))
        said[each.request_id, each.choice] = tokens, each.finish
    assert all(end is not None for _, end in said.values())
    return said


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("drafts", ["off", "ngram"])
@draws(40)
@given(
    script=st.lists(ACTIONS, min_size=4, max_size=20),
    blocks=st.integers(10, 20),
    slots=st.integers(2, 5),
    more=st.integers(0, 12),
)
@pytest.mark.sample("off-attention", "ngram-states")
def test_both_loops_say_the_same(
    kind: str, drafts: str, script: Script, blocks: int, slots: int, more: int
) -> None:
    sizes = {"num_blocks": blocks, "max_model_len": 4 * blocks, "max_num_seqs": slots}
    sizes |= {"max_batched_tokens": slots + more, "state_snapshots": 3}
    found, ahead = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "SPACING", 1)
        patch.setattr(speculation, "NgramProposer", Often)
        patch.setattr(runner, "LEAST_LONG_RUN", 2)
        patch.setattr("snugvl.engine.sampling.masks.WAIT_S", PATIENCE_S)  # however busy this machine is
        for fast in (False, True):
            engine, graphs = engine_with(fast, MODELS[kind], speculation=drafts, **sizes)
            assert isinstance(graphs, EagerGraphs) == fast
            found.append(played(engine, script))
            assert engine.stats.free_blocks == blocks
            ahead += 0 if graphs is None else graphs.followed
    plain, quick = found
    event(f"runs ahead: {ahead > 0}")
    for each in plain.keys() | quick.keys():
        (tokens, end), (others, other_end) = plain.get(each, ([], "abort")), quick.get(each, ([], "abort"))
        common = min(len(tokens), len(others))
        assert tokens[:common] == others[:common], f"{each} was told other tokens"
        if "abort" not in (end, other_end):
            assert (tokens, end) == (others, other_end)
