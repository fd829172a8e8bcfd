"""What an engine allocates is what was planned, to the byte; or planned again, with what changed said."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import snugvl
from snugvl.backends.native import loading
from snugvl.backends.native.allocation import allocate, as_planned, engine_config
from snugvl.backends.native.planned import planned_rows
from snugvl.backends.place import TargetDevice, place_on
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.core.options import LoadOptions, PurposeName
from snugvl.errors import DoesNotFit, InputError, RequestError
from snugvl.hardware.describe import describe
from snugvl.planner.costs import NOTICEABLE, WEIGHT_COST
from snugvl.planner.engines.native.footprint import LOADING, loading_bytes
from snugvl.planner.engines.native.step_graphs import DRAFT_TOKENS, DRIVER, POOL
from snugvl.planner.footprint.vision import pixels_for
from snugvl.planner.goals import COMFORT
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Allocation, allocation_of
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.solve import Candidate, _possible, solve
from snugvl.planner.wishes import Wishes, wishes_of
from tests.draws import draws

MIB, GIB = 1 << 20, 1 << 30
NAMES = (
    "Qwen/Qwen3-VL-2B-Instruct-FP8", "Qwen/Qwen3-VL-4B-Instruct-FP8", "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3.5-4B", "Qwen/Qwen2.5-VL-3B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3",
)  # fmt: skip
TEXT_MODELS = (
    "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen3-8B", "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/Phi-4-mini-instruct", "meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-3.1-8B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
)  # fmt: skip
FACTS = {name: facts_of(name, offline=True) for name in NAMES}
PURPOSES = get_args(PurposeName)
FP8 = FACTS[NAMES[1]]


def gpu(free_bytes: int, **changes: Any) -> TargetDevice:
    return replace(
        TargetDevice(torch.device("cuda"), "a GPU", free_bytes, (12, 0), context_bytes=450 * MIB), **changes
    )


def made(
    facts: ModelFacts, place: TargetDevice, planned: Allocation | None = None, **said: Any
) -> Allocation:
    return allocate(facts, LoadOptions(facts.name, **said), place, planned)


@draws(60)
@given(
    card=st.sampled_from(["rtx-5060", "rtx-3060", "rtx-4090", "t4", "a100", "none"]),
    system=st.sampled_from(["linux", "wsl2"]),
    held=st.integers(0, 6 << 10),
    name=st.sampled_from(NAMES),
    purpose=st.sampled_from(PURPOSES),
    said=st.sampled_from(
        [{}, {}, {"context": 3000}, {"kv_cache": "fp8"}, {"weights": "int4"}, {"concurrency": 3}]
    ),
)
def test_what_is_printed_is_configured_and_is_the_ledgers_plan(
    card: str, system: Any, held: int, name: str, purpose: Any, said: dict[str, Any]
) -> None:
    facts = FACTS[name]
    none = card == "none"
    here = describe(card, ram="32GiB") if none else describe(card, os=system, held=f"{held}MiB")
    sees = facts.vision is not None
    options = LoadOptions(name, purpose=purpose if sees else "chat", **said)
    plan = solve([Candidate(facts)], here, wishes_of(options, sees=sees, backend="native"))
    if plan.choice is None:
        return
    planned, model = allocation_of(plan.choice), inventory(facts)
    # The process that loads finds what the plan counted on: it takes the plan as it is.
    place = (
        gpu(plan.budget.free_bytes, system=system)
        if not none
        else TargetDevice(torch.device("cpu"), "host memory", here.ram_free_bytes)
    )
    if place.usable_bytes >= planned.footprint.total_bytes:
        assert allocate(facts, options, place, planned) is planned
    config = engine_config(planned, options)
    chosen = plan.choice.settings
    assert (config.max_model_len, config.max_num_seqs, config.max_batched_tokens, config.kv_cache) == (
        chosen.context, chosen.sequences, chosen.chunk, chosen.kv,
    )  # fmt: skip
    assert config.cache_tokens == chosen.kv_tokens >= chosen.context * (options.concurrency or 1)
    assert config.step_graph_bytes == planned.footprint.named(POOL)
    rows = planned_rows(planned, model)
    assert sum(rows.values()) == plan.choice.footprint.total_bytes <= plan.budget.usable_bytes
    assert min(rows.values()) >= 0
    text = plain(report(plan, here))
    assert f"{chosen.context:,} tokens for prompt" in text
    assert chosen.weights_name.split(",")[0] in text
    assert chosen.kv_tokens == chosen.context or f"the whole cache has {chosen.kv_tokens:,} tokens" in text


@draws(40)
@given(
    free=st.integers(3 * GIB, 40 * GIB),
    more=st.integers(0, 4 * GIB),
    name=st.sampled_from(NAMES),
    purpose=st.sampled_from(PURPOSES),
    kv_cache=st.sampled_from(["auto", "bf16"]),
)
def test_more_memory_never_gives_less_of_what_people_value(
    free: int, more: int, name: str, purpose: Any, kv_cache: Any
) -> None:
    """Images and context only grow; noticeably better weights take what is beyond comfort, and no comfort."""
    found = []
    facts = FACTS[name]
    purpose = purpose if facts.vision else "chat"
    for size in (free, free + more):
        try:
            found.append(made(facts, gpu(size), purpose=purpose, kv_cache=kv_cache))
        except (DoesNotFit, RequestError):
            assert not found
            return
    less, rich = (each.settings for each in found)
    if less.vision != rich.vision:
        assert rich.vision == "gpu"
        return
    tokens, context, _, _ = COMFORT[purpose]
    most = pixels_for(inventory(facts), tokens) if facts.vision else 0
    before, after = ((min(each.max_pixels or 0, most), min(each.context, context)) for each in (less, rich))
    noticed = [sum(WEIGHT_COST[each.weights] >= least for least in NOTICEABLE) for each in (less, rich)]
    if noticed[0] == noticed[1]:
        before, after = ((each.max_pixels or 0, each.context) for each in (less, rich))
    else:
        assert noticed[0] > noticed[1] or after > before
    assert after[0] >= before[0]
    assert after[1] >= before[1]


@pytest.mark.parametrize(
    ("purpose", "card", "machine"),
    [
        ("chat", "rtx-5060", {"os": "wsl2", "held": "951MiB"}), ("documents", "rtx-3060", {}),
        ("detect", "rtx-4090", {}), ("batch", "rtx-3060", {}),
    ],
)  # fmt: skip
@pytest.mark.sample("documents-rtx-3060-machine1", "detect-rtx-4090-machine2")
def test_a_name_changes_nothing(purpose: Any, card: str, machine: dict[str, Any]) -> None:
    """Who names the model that a plan recommends gets the same settings, from `plan` and from `serve`."""
    from snugvl.planner.recommend import catalogue_candidates

    here = describe(card, **machine)
    led = solve(catalogue_candidates(), here, Wishes(purpose=purpose)).choice
    assert led is not None
    facts = next(each.facts for each in catalogue_candidates() if each.facts.name == led.option.model.name)
    served = wishes_of(LoadOptions(facts.name, purpose=purpose), sees=True)
    assert served == Wishes(purpose=purpose)
    named = solve([Candidate(facts)], here, served).choice
    assert named is not None
    assert named.settings == led.settings


def test_less_than_planned_is_planned_again_and_said_in_numbers() -> None:
    planned = made(FP8, gpu(8 * GIB))
    same = allocate(FP8, LoadOptions(FP8.name), gpu(9 * GIB), planned)
    assert same is planned
    again = allocate(FP8, LoadOptions(FP8.name), gpu(6 * GIB), planned)
    assert again.footprint.total_bytes <= gpu(6 * GIB).usable_bytes < planned.footprint.total_bytes
    assert again.changed.startswith("planned for 7.")
    assert "of which 5.8" in again.changed
    assert f"pool_tokens {planned.settings.pool_tokens} → {again.settings.pool_tokens}" in again.changed


def test_a_driver_that_takes_more_than_planned_is_planned_again_and_said() -> None:
    """A card that nobody has seen: the figure is measured when the engine's process has its context."""
    assumed, measured = gpu(7 * GIB), gpu(7 * GIB, context_bytes=600 * MIB, context_measured=True)
    planned = made(FP8, assumed)
    again = made(FP8, measured, planned)
    assert again.footprint.total_bytes <= measured.usable_bytes
    assert again.settings != planned.settings
    assert again.changed.startswith(
        "the CUDA driver and its libraries take 600 MiB on this GPU, where 450 MiB"
    )
    assert made(FP8, gpu(7 * GIB, context_bytes=454 * MIB), planned) is planned, (
        "late kernels have room for it"
    )
    assert made(FP8, gpu(7 * GIB, context_bytes=300 * MIB), planned) is planned


def test_the_plan_that_runs_says_what_the_driver_may_take() -> None:
    planned = made(FP8, gpu(7 * GIB))
    measured = gpu(7 * GIB, context_bytes=440 * MIB)
    assert as_planned(measured, planned).context_bytes == 450 * MIB
    there = gpu(7 * GIB, context_bytes=0)
    assert as_planned(there, planned) is there, "a context that was there is none of this engine's"
    with pytest.raises(DoesNotFit):
        allocate(FP8, LoadOptions(FP8.name), gpu(2 * GIB), planned)


@draws(16)
@given(free=st.integers(1 << 20, 60 * GIB), weights=st.sampled_from(["auto", "bf16", "int4"]))
def test_never_more_than_may_be_used(free: int, weights: Any) -> None:
    place, facts = gpu(free), FACTS[NAMES[2]]
    try:
        allocation = made(facts, place, weights=weights)
    except DoesNotFit:
        return
    assert allocation.footprint.total_bytes <= place.usable_bytes <= free - min(128 * MIB, free)
    assert allocation.settings.kv_tokens >= allocation.settings.context
    assert sum(planned_rows(allocation, inventory(facts)).values()) == allocation.footprint.total_bytes


def test_graphs_of_prompts_take_what_is_left_and_nothing_else() -> None:
    said: dict[str, Any] = {"context": 4096, "max_pixels": 1 << 20}
    model = inventory(FP8)
    plain_one, graphs = (made(FP8, gpu(48 * GIB), step_graphs=on, **said) for on in (False, True))
    assert engine_config(plain_one, LoadOptions()).step_graph_bytes == 0
    assert 100 * MIB < graphs.footprint.named(POOL) < 700 * MIB
    assert 60 * MIB < graphs.footprint.named(DRIVER) < 90 * MIB
    assert graphs.settings._replace(step_graphs=False) == plain_one.settings
    before, after = planned_rows(plain_one, model), planned_rows(graphs, model)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "CUDA graphs": graphs.footprint.named(POOL),
        "CUDA context and libraries": graphs.footprint.named(DRIVER),
    }
    assert not made(FP8, gpu(10 * GIB), **said).settings.step_graphs, "no room for them"
    assert not made(FP8, gpu(48 * GIB), tower="streamed", **said).settings.step_graphs
    assert made(FACTS["Qwen/Qwen3.5-4B"], gpu(48 * GIB)).settings.step_graphs


@pytest.mark.parametrize("facts", [FP8, FACTS["Qwen/Qwen3.5-4B"]])
def test_guessing_tokens_takes_no_memory(facts: ModelFacts) -> None:
    """With recurrent states neither: they stay behind what is guessed."""
    plan = made(facts, gpu(48 * GIB), speculation="ngram")
    without = made(facts, gpu(48 * GIB), speculation="off")
    assert plan.settings == without.settings
    assert plan.footprint == without.footprint
    assert engine_config(plan, LoadOptions(speculation="ngram")).speculation == "ngram"
    assert engine_config(plan, LoadOptions()).speculation == "auto"


def test_the_engine_is_configured_by_options_of_its_fields_names() -> None:
    """But for what the plan decides: that may be "auto" where somebody said nothing."""
    plan = made(FP8, gpu(48 * GIB))
    said: dict[str, Any] = {"prefix_cache": False, "speculation": "ngram", "max_waiting": 7}
    config = engine_config(plan, LoadOptions(**said, context=1, kv_cache="auto"))
    assert {name: getattr(config, name) for name in said} == said
    assert (config.max_model_len, config.kv_cache) == (plan.settings.context, plan.settings.kv)
    plain = engine_config(plan, LoadOptions())
    assert (plain.prefix_cache, plain.speculation, plain.max_waiting) == (True, "auto", 256)


def test_where_one_sequence_runs_no_row_is_left_for_drafts() -> None:
    place, facts = gpu(12 * GIB), FACTS["Qwen/Qwen3.5-4B"]
    plain = made(facts, place, speculation="off").settings
    wishes = Wishes(backend="native", speculation="mtp")
    fitters, _ = _possible(Candidate(facts), place.machine, wishes, [place.budget], {})
    mine = [each for each in fitters if each.option.gives(plain._replace(predictor=True))]
    assert mine
    assert all(each.guessing(plain) is not None for each in mine)
    assert all(each.guessing(plain._replace(sequences=1)) is None for each in mine)


def test_a_predictor_is_planned_for_who_asks_and_where_it_takes_cache_alone() -> None:
    facts = FACTS["Qwen/Qwen3.5-4B"]
    for free, context in ((48 * GIB, None), (9 * GIB, None), (7 * GIB, 8192), (5500 * MIB, 30_000)):
        plain, asked, auto = (
            made(facts, gpu(free), speculation=kind, context=context) for kind in ("ngram", "mtp", "auto")
        )
        assert asked.settings.predictor
        assert asked.footprint.named("weights: predictor") > 0
        assert asked.footprint.named("predictor: hidden states") > 0
        before, after = plain.settings, auto.settings
        assert after.predictor is (free != 5500 * MIB), (
            "there its keys and values would be half of the cache's"
        )
        assert auto.footprint.total_bytes <= auto.usable_bytes
        config = engine_config(auto, LoadOptions())
        assert config.step_graph_tokens == (DRAFT_TOKENS if after.draft_graphs else 0)
        assert bool(config.step_graph_bytes) is (after.draft_graphs or after.step_graphs)
        assert after.predictor <= (after.draft_graphs or after.step_graphs), "without graphs drafts lose"
        own = {"predictor": False, "draft_graphs": False, "pool_tokens": before.pool_tokens}
        assert after._replace(**own, state_snapshots=before.state_snapshots) == before
        assert before.kv_tokens // 2 <= after.kv_tokens <= before.kv_tokens
        assert min(before.state_snapshots, 4) <= after.state_snapshots <= before.state_snapshots
    with pytest.raises(RequestError, match="no multi-token predictor for --speculation mtp") as caught:
        made(FP8, gpu(48 * GIB), speculation="mtp")
    assert caught.value.field == "speculation"
    assert not made(FP8, gpu(48 * GIB), speculation="auto").settings.predictor


def test_a_limit_is_kept() -> None:
    limited = gpu(24 * GIB, limit_bytes=4400 * MIB)
    assert limited.usable_bytes == 4400 * MIB
    assert made(FP8, limited).footprint.total_bytes <= 4400 * MIB
    assert gpu(2 * GIB, limit_bytes=3 * GIB).usable_bytes < 2 * GIB


def test_what_was_asked_for_is_kept_or_refused_with_what_fits() -> None:
    facts = FACTS[NAMES[2]]
    found = made(facts, gpu(24 * GIB), context=3000, max_pixels=1_000_000).settings
    assert (found.context, found.max_pixels) == (3000, 1_000_000)
    with pytest.raises(DoesNotFit, match=r"8B-Instruct does not fit a GPU.*KV cache|weights .*more than the"):
        made(facts, gpu(8 * GIB), context=65_536, weights="bf16")
    with pytest.raises(RequestError, match=r"ends at 262,144 tokens, 300,000 are asked for") as long:
        made(facts, gpu(60 * GIB), context=300_000)
    assert long.value.field == "context"
    with pytest.raises(RequestError, match=r"fp8 weights can't be made of it.*stored in bf16") as format_:
        made(facts, gpu(60 * GIB), weights="fp8")
    assert format_.value.field == "weights"
    assert made(FP8, gpu(60 * GIB), weights="bf16").settings.weights == "bf16"


def test_a_limit_that_holds_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="more than 0 bytes, not -5"):
        snugvl.load("pocket", device="cpu", memory=-5)
    with pytest.raises(DoesNotFit, match="may be used"):
        snugvl.load("pocket", device="cpu", memory=1 << 20)
    with pytest.raises(InputError, match="memory 'much' is not a size"):
        snugvl.load("pocket", device="cpu", memory="much")


def test_load_obeys_it() -> None:
    with snugvl.load("pocket", device="cpu", context=1000) as model:
        assert model.capabilities.context_tokens == 1000
        assert model.capabilities.weights == "fp32"
        text = 2 * 6 * 2 * 64 * 4  # keys and values · layers · kv heads · head size · float32
        assert model.memory()["kv_cache"] % (text * 16) == 0
    with pytest.raises(RequestError, match="ends at 4,096 tokens, 5,000 are asked for"):
        snugvl.load("pocket", device="cpu", context=5000)
    with pytest.raises(RequestError, match="device 'tpu'"):
        snugvl.load("pocket", device="tpu")
    with pytest.raises(RequestError, match="dtype 'int3'"):
        snugvl.load("pocket", dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="weights 'int3'"):
        snugvl.load("pocket", device="cpu", weights="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_text_models_leave_no_room_for_pictures(name: str) -> None:
    facts, place = facts_of(name, offline=True), gpu(7 * GIB)
    allocation = made(facts, place)
    found = allocation.settings
    assert (found.images, found.max_pixels, found.encoder_cache_bytes) == (0, None, 0)
    rows = planned_rows(allocation, inventory(facts))
    assert rows["vision weights"] == 0
    assert found.context <= (facts.native_positions or facts.text.max_position_embeddings)
    with pytest.raises(DoesNotFit) as refused:
        made(facts, gpu(1 * GIB))
    assert "pixels" not in str(refused.value)


def test_weights_are_read_in_pieces_as_large_as_there_is_room_for() -> None:
    """Before there is a KV cache, by fewer threads where there is little."""
    roomy = gpu(40 * GIB)
    allocation = made(FP8, roomy, weights="int4")
    model, needed = inventory(FP8), allocation.footprint
    assert loading._readers(model, allocation, roomy) == LOADING[0]
    later = needed.named("KV cache") + needed.named("CUDA graphs")
    sizes = [loading_bytes(model, allocation.settings, *each) for each in LOADING]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    for each, room in zip(LOADING, sizes, strict=True):
        tight = replace(roomy, limit_bytes=needed.always_bytes - later + room)
        assert loading._readers(model, allocation, tight) == each
    assert loading._readers(model, allocation, replace(roomy, limit_bytes=1)) == (1, 8 * MIB)
    assert loading._readers(model, allocation, replace(roomy, device=torch.device("cpu"))) == (1, 8 * MIB)
    assert loading._readers(model, allocation, replace(roomy, pinned_bytes=4 * GIB)) == (4, 8 * MIB)


def test_a_process_without_a_home_loads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose user is a number. What could be kept is found out at each start."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(loading, "cache_folder", fail)
    assert loading._kept() is None
    with snugvl.load("pocket", device="cpu", context=512) as model:
        assert model.capabilities.context_tokens == 512


def test_a_tower_left_out_makes_room() -> None:
    place = gpu(6 * GIB)
    whole, blind = (made(FP8, place, language_only=only) for only in (False, True))
    assert (whole.settings.images, blind.settings.images, blind.settings.max_pixels) == (1, 0, None)
    assert planned_rows(blind, inventory(FP8))["vision weights"] == 0
    assert blind.settings.kv_tokens > whole.settings.kv_tokens
    assert blind.subject != whole.subject


def test_a_context_beyond_long_ropes_first_one_names_who_runs_it() -> None:
    facts = facts_of("microsoft/Phi-3.5-mini-instruct", offline=True)
    with pytest.raises(RequestError, match=r"ends at 4,096 tokens here.*up to 131,072"):
        made(facts, gpu(40 * GIB), context=8192)
    assert made(facts, gpu(40 * GIB)).settings.context == 4096


def test_on_a_cpu_there_are_no_graphs() -> None:
    found = made(FACTS[NAMES[0]], place_on(torch.device("cpu")))
    assert found.settings.eager
    assert not found.settings.step_graphs
