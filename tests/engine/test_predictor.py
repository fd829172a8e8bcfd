"""Drafts of the multi-token predictor: they are transformers' own, and change no answer."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from training.predictor import Predictor
from transformers import Qwen3_5ForConditionalGeneration

from snugvl.core.config import RECENT, EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine import snapshots
from snugvl.engine.drafts import Drafts
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.decode import Replay
from snugvl.engine.predictor import Drafter
from snugvl.engine.request import EngineRequest
from snugvl.engine.scheduler import Schedule
from snugvl.engine.sequence import BlockPool, Sequence
from snugvl.engine.speculation import Speculation
from snugvl.errors import CheckpointError, RequestError
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork
from tests import hybrid
from tests.checkpoints import IMAGE
from tests.engine.eager import EagerGraphs
from tests.engine.test_grammar import END, Rule, phrases
from tests.engine.test_network import requests
from tests.engine.test_prefill_graphs import recorded
from tests.engine.test_speculation_states import asked, said
from tests.engine.toy import run, tokens

CPU = torch.device("cpu")
WIDE = {"num_blocks": 400, "max_batched_tokens": 160}
GREEDY = SamplingParams(max_tokens=3)
SIZES = {"num_blocks": 80, "block_size": 8, "max_model_len": 160, "max_batched_tokens": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 whose predictor has learned what the model says to `asked`, by heart."""
    folder = hybrid.write(tmp_path_factory.mktemp("hybrid"), hybrid.Options(predictor=True))
    learn(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadableNetwork:
    return load_model(folder, dtype=torch.float32, device=CPU, predictor=True)


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[tuple[str, int], list[int]]:
    """What a network says that has no predictor."""
    return said(Engine(load_model(folder, dtype=torch.float32, device=CPU), EngineConfig(**SIZES)), asked())


@torch.no_grad()
def seen_by(
    model: Qwen3_5ForConditionalGeneration, request: EngineRequest, answer: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, positions and hidden states of a prompt with its pictures, and of what follows it."""
    found: dict[str, Any] = {}
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: found.update(kwargs), with_kwargs=True
    )
    ids = [*request.prompt_ids, *answer]
    inputs = {"input_ids": torch.tensor([ids])}
    if request.vision:
        inputs["mm_token_type_ids"] = torch.tensor([[int(token == IMAGE) for token in ids]])
        inputs["pixel_values"] = torch.cat([item.patches for item in request.vision])
        inputs["image_grid_thw"] = torch.tensor([item.grid_thw for item in request.vision])
    hidden = model.model(**inputs).last_hidden_state
    hook.remove()
    positions = found["position_ids"]
    positions = torch.arange(len(ids)).expand(3, 1, -1) if positions is None else positions[-3:]
    return found["inputs_embeds"], positions, hidden


def predictor_in(folder: Path, model: Qwen3_5ForConditionalGeneration) -> Predictor:
    predictor = Predictor(model)
    state = load_file(folder / "model.safetensors")
    predictor.load_state_dict({n[4:]: tensor for n, tensor in state.items() if n.startswith("mtp.")})
    return predictor


def learn(folder: Path) -> None:
    """Train the predictor for a second or two on the answers themselves."""
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    plain = load_model(folder, dtype=torch.float32, device=CPU)
    lines = said(Engine(plain, EngineConfig(**SIZES)), asked())
    by_name = {item.request_id: item for item in asked()}
    texts = [(*seen_by(model, by_name[name], line), [*by_name[name].prompt_ids, *line])
             for (name, _), line in lines.items()]  # fmt: skip
    torch.manual_seed(0)
    predictor = predictor_in(folder, model)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=4e-3)
    head = model.get_output_embeddings()
    for _ in range(30):
        loss = torch.zeros(())
        for embedded, positions, hidden, ids in texts:
            found = predictor(embedded[:, 1:-1], hidden[:, :-2], positions[:, :, :-2])
            loss = loss + cross_entropy(head(found)[0], torch.tensor(ids[2:]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    state = load_file(folder / "model.safetensors")
    state |= {f"mtp.{name}": tensor.detach() for name, tensor in predictor.state_dict().items()}
    save_file(state, folder / "model.safetensors")


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence, int, list[int]]]:
    """Whoever was given drafts, the tokens of its answer until then, and the drafts."""
    found: list[tuple[Sequence, int, list[int]]] = []
    original = Drafter.ask

    def ask(self: Drafter, sequences: list[Sequence], count: int, pool: BlockPool) -> None:
        original(self, sequences, count, pool)
        for each in sequences:
            assert each.drafts is not None
            if each.drafts.found is not None and each.drafts.asked(each.length):
                found.append((each, len(each.generated), list(each.drafts.found.read(count))))

    monkeypatch.setattr(Drafter, "ask", ask)
    return found


@torch.no_grad()
def foretold(
    predictor: Predictor, model: Qwen3_5ForConditionalGeneration, request: EngineRequest, answer: list[int],
    count: int,
) -> list[int]:  # fmt: skip
    """What transformers' parts predict behind an answer, from the whole text at once each time."""
    embedded, positions, hidden = seen_by(model, request, answer)
    embedded, hidden, positions = embedded[:, 1:], hidden[:, :-1], positions[:, :, :-1]
    head, embed, tokens_ = model.get_output_embeddings(), model.get_input_embeddings(), list[int]()
    for _ in range(count):
        found = predictor(embedded, hidden, positions)
        tokens_.append(int(head(found[:, -1]).argmax()))
        hidden = torch.cat((hidden, found[:, -1:]), 1)
        embedded = torch.cat((embedded, embed(torch.tensor([tokens_[-1:]]))), 1)
        positions = torch.cat((positions, positions[:, :, -1:] + 1), 2)
    return tokens_


@pytest.fixture(params=["learned", "random"])
def either(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A predictor whose drafts are often right, or one that any change of a number takes elsewhere."""
    if request.param == "learned":
        return folder
    monkeypatch.setattr(Drafts, "learn", lambda *_: None)  # it is never right, and asked all the same
    return hybrid.write(tmp_path, hybrid.Options(predictor=True))


@pytest.mark.sample("random")
def test_drafts_are_those_of_transformers_parts(
    either: Path, drafted: list[tuple[Sequence, int, list[int]]]
) -> None:
    """With pictures, in company, with wrong drafts before them.

    Where a picture goes on in the next chunk, the last entry is of a placeholder: not here.
    """
    model = load_model(either, dtype=torch.float32, device=CPU, predictor=True)
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(either, dtype=torch.float32)
    said(Engine(model, EngineConfig(**SIZES | {"max_batched_tokens": 160}, speculation="mtp")), asked())
    predictor = predictor_in(either, theirs)
    assert any(each.prompt.vision for each, *_ in drafted)
    assert len(drafted) > 40
    for each, length, drafts in [found for found in drafted if found[1] < 5]:
        assert drafts == foretold(predictor, theirs, each.request, each.generated[:length], len(drafts))


@pytest.mark.parametrize("kind", ["plain", "snapshots", "graphs", "now and then"])
@pytest.mark.sample("snapshots", "graphs")
def test_answers_are_those_without(
    kind: str,
    model: LoadableNetwork,
    right: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and drawn, with pictures, alone, in company and preempted; and most drafts are right."""
    if kind == "now and then":  # as it is where it is measured what pays
        steps = count()
        monkeypatch.setattr(Speculation, "_pays", lambda self, streams: next(steps) // 5 % 2 == 0)
    monkeypatch.setattr(snapshots, "SPACING", 1)
    config = EngineConfig(**SIZES, speculation="mtp", state_snapshots=6 if kind == "snapshots" else 0)

    def engine_of(config: EngineConfig) -> Engine:
        made = Engine(model, config)
        if kind == "graphs":
            recorded(made)
        if kind in ("graphs", "now and then"):
            made._runner.graphs, made._runner.has_graphs = EagerGraphs(made), True
        return made

    together = engine_of(config)
    assert said(together, asked()) == right
    stats = together.stats
    assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 15
    one = stats.generated_tokens - stats.accepted_tokens  # of each step one would have come anyway
    assert stats.generated_tokens > (1.2 if kind == "now and then" else 1.5) * one
    for item in asked() if kind in ("plain", "graphs") else ():
        alone = said(engine_of(config), [item])
        assert alone == {key: line for key, line in right.items() if key[0] == item.request_id}
    tight = engine_of(replace(config, num_blocks=14, max_model_len=96, max_num_seqs=5, max_batched_tokens=9))
    assert said(tight, asked()) == right
    assert tight.stats.preemptions > 0
    assert tight.stats.accepted_tokens > 0
    assert tight.stats.faults == together.stats.faults == 0


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.sample("False-False", "True-False")
def test_the_host_starts_a_step_without_knowing_its_drafts(
    graphs: bool,
    gone: bool,
    model: LoadableNetwork,
    right: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But where they are `gone` from the device, or tokens count: then it waits for them."""
    engine = Engine(model, EngineConfig(**SIZES, speculation="mtp"))
    if graphs:
        recorded(engine)
    unread: list[bool] = []
    run_, extend = engine._runner.run, engine._speculation.extend

    def watched(step: Schedule) -> tuple[torch.Tensor, Replay | None]:
        for chunk in step.chunks:
            if chunk.unseen is not None:
                assert set(chunk.drafts) == {0}
                assert chunk.unseen.found._found is None  # type: ignore[attr-defined]
            unread.extend([chunk.unseen is not None] if chunk.drafts else [])
        return run_(step)

    def forgetful(step: Schedule, pool: BlockPool) -> None:
        assert engine._runner.drafter is not None
        engine._runner.drafter.forget()
        extend(step, pool)

    monkeypatch.setattr(engine._runner, "run", watched)
    if gone:
        monkeypatch.setattr(engine._speculation, "extend", forgetful)
        monkeypatch.setattr(engine._speculation, "_ask", lambda *_: None, raising=False)
        ahead = Speculation._ask
        monkeypatch.setattr(
            engine._speculation,
            "ask_ahead",
            lambda scheduler: ahead(engine._speculation, scheduler.running, scheduler.pool),
        )
    assert said(engine, asked()) == right
    assert len(unread) > 10
    assert any(unread) != gone
    assert all(unread) != gone
    unread.clear()
    sampling = SamplingParams(max_tokens=20, repetition_penalty=1.2)
    item = EngineRequest("punished", requests()[0].prompt_ids, sampling)
    off = Engine(model, EngineConfig(**SIZES))
    assert tokens(run(engine, item)["punished"]) == tokens(run(off, item)["punished"])
    assert unread
    assert not any(unread)


def test_where_nobody_guessed_for_a_while_the_predictor_catches_up(
    either: Path, drafted: list[tuple[Sequence, int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hidden states that decode graphs leave; if that was too long it is not asked any more."""
    pauses = range(4, 14)
    monkeypatch.setattr(Speculation, "_pays", lambda self, streams: len(generated()) not in pauses)

    def generated() -> list[int]:
        return engine._requests["0"][0].generated if engine._requests else []

    model = load_model(either, dtype=torch.float32, device=CPU, predictor=True)
    theirs = Qwen3_5ForConditionalGeneration.from_pretrained(either, dtype=torch.float32)
    engine = Engine(model, EngineConfig(**SIZES, speculation="mtp"))
    eager = EagerGraphs(engine)
    engine._runner.graphs, engine._runner.has_graphs = eager, True
    item = asked()[0]
    said(engine, [item])
    assert eager.started + eager.followed >= len(pauses) - 2, "they have run ahead"
    predictor = predictor_in(either, theirs)
    later = [each for each in drafted if each[1] >= pauses.stop]
    assert later
    for each, length, drafts in later[:6]:
        assert drafts == foretold(predictor, theirs, item, each.generated[:length], len(drafts))
    sequence = later[0][0]
    assert sequence.drafts is not None
    sequence.lag, sequence.drafts.entries = 0, sequence.computed - RECENT
    assert Drafter.keeps_up(sequence)
    sequence.drafts.entries -= 1
    assert not Drafter.keeps_up(sequence)


def test_a_typed_answer_takes_drafts_that_its_grammar_takes(model: LoadableNetwork) -> None:
    item = EngineRequest(
        "a", (1, 3), SamplingParams(max_tokens=30), stop_ids=frozenset([END]), grammar=Rule(phrases)
    )
    without = Engine(model, EngineConfig(**SIZES))
    engine = Engine(model, EngineConfig(**SIZES, speculation="mtp"))
    assert tokens(run(engine, item)["a"]) == tokens(run(without, item)["a"])


def test_a_second_turn_starts_from_the_predictors_entries(
    model: LoadableNetwork, right: dict[tuple[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are part of the blocks: an answer that goes on finds its drafts as right as before."""
    monkeypatch.setattr(snapshots, "SPACING", 1)
    item = asked()[0]
    engine = Engine(model, EngineConfig(**SIZES, speculation="mtp", state_snapshots=6))
    first = replace(item, sampling=replace(item.sampling, max_tokens=14))
    head = tokens(run(engine, first)["0"])
    before = engine.stats
    again = EngineRequest("b", (*item.prompt_ids, *head), replace(item.sampling, max_tokens=10))
    assert [*head, *tokens(run(engine, again)["b"])] == right["0", 0]
    after = engine.stats
    assert after.prefix_hit_tokens > before.prefix_hit_tokens
    assert after.accepted_tokens > before.accepted_tokens


def test_what_is_drawn_has_the_distribution_without(model: LoadableNetwork) -> None:
    """Without seeds: of how many answers a token is the second one, which the predictor may have guessed."""
    shares: dict[str, list[float]] = {}
    for mode in ("off", "mtp"):
        engine = Engine(model, EngineConfig(**SIZES | WIDE, max_num_seqs=64, speculation=mode))
        drawn = SamplingParams(max_tokens=3, temperature=0.5, n=25)
        asked_ = [EngineRequest(str(number), requests()[0].prompt_ids, drawn) for number in range(6)]
        outputs = {name: told for item in asked_ for name, told in run(engine, item).items()}
        said_ = [tokens(outputs[item.request_id], choice)[1] for item in asked_ for choice in range(25)]
        likely = tokens(run(engine, replace(asked_[0], request_id="x", sampling=GREEDY))["x"])[1]
        shares[mode] = [said_.count(likely) / len(said_), len(set(said_)) / len(said_)]
    assert engine.stats.drafted_tokens > 20
    for off, mtp in zip(shares["off"], shares["mtp"], strict=True):  # of 150: a deviation is below 0.04
        assert abs(off - mtp) < 0.2
    assert 0 < shares["off"][0] < 1


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return hybrid.write(tmp_path, hybrid.Options())


def test_without_a_predictor_it_is_refused(bare: Path, model: LoadableNetwork) -> None:
    with pytest.raises(RequestError, match=r"no multi-token predictor .* use 'ngram'"):
        load_model(bare, dtype=torch.float32, device=CPU, predictor=True)
    plain = load_model(bare, dtype=torch.float32, device=CPU)
    with pytest.raises(RequestError, match="no multi-token predictor") as caught:
        Engine(plain, EngineConfig(**SIZES, speculation="mtp"))
    assert caught.value.field == "speculation"
    assert Engine(model, EngineConfig(**SIZES, speculation="auto")).stats.draft_method == "mtp"
    assert Engine(plain, EngineConfig(**SIZES, speculation="auto")).stats.draft_method == "", (
        "n-grams are asked for"
    )


def test_a_predictor_that_is_not_whole_is_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    state = load_file(folder / "model.safetensors")
    del state["mtp.norm.weight"]
    save_file(state, copy / "model.safetensors")
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    load_model(copy, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=r"lacks tensor 'mtp.norm.weight'"):
        load_model(copy, dtype=torch.float32, device=CPU, predictor=True)


def test_formats(tmp_path: Path) -> None:
    """Its layer is rounded like the decoder's; what joins both halves stays as it is. Not FP8 in files that
    aren't."""
    options = hybrid.Options(predictor=True, hidden=128, tied=False)
    folder = hybrid.write(tmp_path, options)
    model = load_model(
        folder, dtype=torch.float32, device=CPU, predictor=True, storage=Storage("int4", "int8")
    )
    layer = model.mtp.layers[0]
    assert layer.self_attn.qkv_proj.format == "int4"
    assert model.mtp.fc.format == "bf16"
    hidden = torch.randn(3, 128)
    logits = model.lm_head(hidden)
    assert model.draft(hidden).tolist() == logits.argmax(-1).tolist()
    first = model.lm_head.first(200)
    torch.testing.assert_close(first(hidden), logits[:, :200])
    assert first.weight.data_ptr() == model.lm_head.weight.data_ptr()
