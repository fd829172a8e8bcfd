"""Guesses in models with recurrent states: the state stays behind them; nothing is lost or taken twice."""

from pathlib import Path

import pytest
import torch

from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine import snapshots, speculation
from snugvl.engine.drafts import Drafts
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.decode import Replay
from snugvl.engine.request import EngineRequest
from snugvl.engine.scheduler import Chunk, Schedule
from snugvl.engine.speculation import MOST, Speculation
from snugvl.layers.delta_rule import CHUNK
from snugvl.models.loader import load_model
from tests import hybrid
from tests.engine.eager import engine_with, request
from tests.engine.test_grammar import END, Rule, phrases
from tests.engine.test_network import requests
from tests.engine.test_speculation import SIZES, Prophet, Sure, measuring
from tests.engine.toy import HybridToy, run, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid.write(tmp_path_factory.mktemp("hybrid"), hybrid.Options())


def asked() -> list[EngineRequest]:
    """Greedy ones that see pictures, and drawn ones."""
    drawn = SamplingParams(max_tokens=30, temperature=0.9, seed=4, n=2)
    cold = SamplingParams(max_tokens=30, temperature=0.3, seed=5)
    return [
        *requests(),
        EngineRequest("drawn", tuple(range(40, 60)), drawn),
        EngineRequest("cold", (7, 8, 7, 8, 7), cold),
    ]


def said(engine: Engine, items: list[EngineRequest]) -> dict[tuple[str, int], list[int]]:
    outputs = run(engine, *items)
    return {
        (item.request_id, choice): tokens(outputs[item.request_id], choice)
        for item in items
        for choice in range(item.sampling.n)
    }


@pytest.mark.parametrize("guesses", ["ngrams", "prophet", "half right"])
@pytest.mark.sample("half right")
def test_a_small_qwen3_5_says_the_same_alone_and_in_company(
    guesses: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where sums of several rows round otherwise than those of one."""
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    sizes = {"num_blocks": 80, "block_size": 8, "max_model_len": 160, "max_batched_tokens": 40}
    right = said(Engine(model, EngineConfig(**sizes)), asked())
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    for item in asked():
        lines = [right[item.request_id, choice] for choice in range(item.sampling.n)]
        answers.setdefault(item.prompt_ids, []).extend(lines)
    assert len({tuple(line) for line in right.values()}) == len(right)
    if guesses != "ngrams":
        monkeypatch.setattr(Prophet, "answers", answers)
        monkeypatch.setattr(Prophet, "wrong", 3 if guesses == "half right" else 1 << 30)
        monkeypatch.setattr(speculation, "NgramProposer", Prophet)
    monkeypatch.setattr(snapshots, "SPACING", 1)
    config = EngineConfig(**sizes, speculation="ngram", state_snapshots=6)
    together = Engine(model, config)
    assert said(together, asked()) == right
    for item in asked():
        alone = said(Engine(model, config), [item])
        assert alone == {key: line for key, line in right.items() if key[0] == item.request_id}
    tight = Engine(
        model,
        EngineConfig(num_blocks=14, block_size=8, max_model_len=96, max_num_seqs=5, max_batched_tokens=9,
                     speculation="ngram"),
    )  # fmt: skip
    assert said(tight, asked()) == right
    assert tight.stats.preemptions > 0
    if guesses != "ngrams":
        assert together.stats.accepted_tokens > 60
        share = together.stats.accepted_tokens / together.stats.drafted_tokens
        assert (share < 0.75) == (guesses == "half right")


def chunks_of(engine: Engine) -> list[tuple[int, int, int]]:
    """Of each chunk that runs from now on: first token, those after it that the state takes in, guesses."""
    seen: list[tuple[int, int, int]] = []
    original = engine._runner.run

    def watched(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        seen.extend((c.start, c.end - c.start - c.unsure, len(c.drafts)) for c in step.chunks)
        return original(step)

    engine._runner.run = watched  # type: ignore[method-assign]
    return seen


def never_jumped(seen: list[tuple[int, int, int]], spacing: int) -> bool:
    """Whether no chunk passes the end of a block where a snapshot is due, and ends in another one."""
    kept = 0
    for start, sure, _ in seen[1:]:
        last, end = (start + sure) // 4 * 4, start + sure
        if last > start and last - kept >= 4 * spacing:
            if last < end:
                return False
            kept = end
    return kept > 0


def prophet(monkeypatch: pytest.MonkeyPatch, item: EngineRequest, line: list[int], wrong: int) -> None:
    monkeypatch.setattr(Prophet, "answers", {item.prompt_ids: [line]})
    monkeypatch.setattr(Prophet, "wrong", wrong)
    monkeypatch.setattr(speculation, "NgramProposer", Prophet)


def quoting() -> EngineRequest:
    return request("a", [1, 2, 3, 4, 5], max_tokens=40)


@pytest.mark.parametrize("wrong", [1 << 30, 5])
def test_right_guesses_come_again_and_wrong_ones_do_not(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = engine_with(False, HybridToy(), **SIZES)
    line = tokens(run(plain, quoting())["a"])
    prophet(monkeypatch, quoting(), line, wrong)
    engine, _ = engine_with(False, HybridToy(), speculation="ngram", **SIZES)
    seen = chunks_of(engine)
    assert tokens(run(engine, quoting())["a"]) == line
    place = 0
    for start, sure, _ in seen:
        assert start == place, "each token enters the state once, and none is left out"
        place += sure
    again = sum(sure - 1 for _, sure, _ in seen[1:])
    assert 0 < again <= engine.stats.accepted_tokens, "what was wrong isn't computed again"
    assert engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert (engine.stats.accepted_tokens > 25) == (wrong > 40)


def test_an_answers_checkpoint_is_where_steps_would_jump_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state stops at a block's end on the way, or steps of eight tokens would never end there."""
    monkeypatch.setattr(snapshots, "SPACING", 2)
    plain, _ = engine_with(False, HybridToy(), **SIZES)
    for length in (4, 5, 6, 7):
        item = request("a", list(range(1, length + 1)), max_tokens=40)
        line = tokens(run(plain, item)["a"])
        prophet(monkeypatch, item, line, 1 << 30)
        engine, _ = engine_with(False, HybridToy(), speculation="ngram", **SIZES)
        seen = chunks_of(engine)
        run(engine, item)
        assert never_jumped(seen, 2)
    length += len(line)
    follow = request("b", [*item.prompt_ids, *line, 9], max_tokens=6)
    monkeypatch.setattr(Prophet, "propose", lambda self, most: [])
    before = engine.stats.prefix_hit_tokens
    warm = tokens(run(engine, follow)["b"])
    assert engine.stats.prefix_hit_tokens - before >= length - MOST - 1 - 2 * 4 - 4
    assert warm == tokens(run(plain, follow)["b"])


def test_forced_tokens_stop_at_a_checkpoint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are computed with what follows them."""
    monkeypatch.setattr(snapshots, "SPACING", 1)
    item = EngineRequest(
        "a", (1, 3), SamplingParams(max_tokens=30), stop_ids=frozenset([END]), grammar=Rule(phrases)
    )
    right = tokens(run(engine_with(False, HybridToy(), skip_forced=False)[0], item)["a"])
    engine, _ = engine_with(False, HybridToy(), state_snapshots=8)
    seen = chunks_of(engine)
    assert tokens(run(engine, item)["a"]) == right
    assert any(sure > 1 for _, sure, _ in seen[1:]), "none was forced"
    assert never_jumped(seen, 1)


def test_no_chunk_with_guesses_is_longer_than_the_delta_rule_reads_at_once() -> None:
    engine, _ = engine_with(False, HybridToy(), speculation="ngram", **SIZES | {"max_model_len": 200})
    engine.add(request("a", [1, 2] * 6, max_tokens=150))
    for _ in range(4):
        engine.step()
    (sequence,) = engine._requests["a"]
    (chunk,) = engine._scheduler.schedule().chunks
    for length, room in ((1, MOST), (CHUNK - 3, 3), (CHUNK, 0), (CHUNK + 9, 0)):
        sequence.drafts = Drafts(Sure(), width=MOST)
        longer = Chunk(sequence, chunk.end - length, chunk.end)
        assert len(engine._speculation._drafts([longer], 100).get(0, [])) == room


def test_auto_counts_the_steps_of_what_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without guesses that computes those of the step before is part of their price."""
    noted: list[bool] = []
    plain, _ = engine_with(False, HybridToy(), **SIZES)
    line = tokens(run(plain, quoting())["a"])
    prophet(monkeypatch, quoting(), line, 1 << 30)
    ask = Prophet.propose
    monkeypatch.setattr(
        Prophet, "propose", lambda self, most: ask(self, most) if len(self.generated) % 9 == 1 else []
    )
    engine, _ = measuring(False, HybridToy())
    seen = chunks_of(engine)
    monkeypatch.setattr(Speculation, "_pays", lambda self, streams: True)
    monkeypatch.setattr(speculation.Payoff, "note", lambda self, drafted, *rest: noted.append(drafted))
    assert tokens(run(engine, quoting())["a"]) == line
    decoding = seen[1:]
    assert noted == [guesses > 0 or sure > 1 for _, sure, guesses in decoding]
    assert any(sure > 1 and not guesses for _, sure, guesses in decoding)
    assert not all(noted)
