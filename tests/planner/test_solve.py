"""The solver: monotone, sound, obedient to wishes, and honest about what doesn't fit."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snugvl.errors import DoesNotFit, RequestError
from snugvl.planner import solve as solver
from snugvl.planner.budget import budgets
from snugvl.planner.capabilities import options
from snugvl.planner.engines.native.hybrid import NATIVE_STEPS
from snugvl.planner.fit import Fitter
from snugvl.planner.footprint.total import footprint
from snugvl.planner.goals import COMFORT, STEPS
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Plan
from snugvl.planner.solve import Candidate, choice_for, require, solve
from snugvl.planner.wishes import Wishes
from tests.draws import draws
from tests.planner.machines import GIB, MIB, machine, rtx_5060
from tests.planner.models import Fixed, qwen3_vl, text_only, with_rule

FACTS = {(size, fp8): qwen3_vl(size, fp8=fp8) for size in ("2B", "4B", "8B") for fp8 in (False, True)}
CATALOGUE = [Candidate(facts, ["2B", "4B", "8B"].index(size)) for (size, _), facts in FACTS.items()]


def wished(**values: Any) -> Wishes:
    """Wishes; plain ones in place of two that exclude one another."""
    try:
        return Wishes(**values)
    except RequestError:
        return Wishes()


wishes_strategy = st.builds(
    wished,
    context=st.sampled_from([None, 2048, 4096, 16384]),
    images=st.sampled_from([0, 1, 2]),
    task=st.sampled_from(["caption", "scene"]),
    quality=st.sampled_from(["any", "fp8", "bf16"]),
    weights=st.sampled_from([None, None, None, "bf16", "fp8", "int4"]),
    backend=st.sampled_from(["auto", "native", "transformers", "vllm"]),
    concurrency=st.sampled_from([1, 2, 4]),
    kv_cache=st.sampled_from([None, None, "bf16", "fp8"]),
)


def one(size: str, fp8: bool = True, wishes: Wishes | None = None, on: object = None) -> Plan:
    return solve([Candidate(FACTS[size, fp8])], on or rtx_5060(), wishes or Wishes())  # type: ignore[arg-type]


@given(
    total=st.integers(1024, 100 * 1024),
    more=st.integers(0, 8 * 1024),
    os=st.sampled_from(["linux", "wsl2"]),
    gpus=st.sampled_from([1, 2]),
    wishes=wishes_strategy,
)
@example(10778, 2505, "linux", 2, Wishes(context=2048, concurrency=2))  # a copy each instead of both for one
@example(10778, 2284, "wsl2", 2, Wishes(context=2048, images=2, concurrency=2))  # and each with smaller steps
@draws(25)
def test_more_memory_never_yields_less(total: int, more: int, os: str, gpus: int, wishes: Wishes) -> None:
    small = solve(CATALOGUE[-4:], machine(total * MIB, os=os, gpus=gpus), wishes).choice  # type: ignore[arg-type]
    large = solve(CATALOGUE[-4:], machine((total + more) * MIB, os=os, gpus=gpus), wishes).choice  # type: ignore[arg-type]
    assert small is None or (large is not None and large.score >= small.score)


@given(
    total=st.integers(1024, 100 * 1024), held=st.floats(0, 0.9), os=st.sampled_from(["linux", "wsl2"]),
    gpus=st.sampled_from([1, 2]), wishes=wishes_strategy,
)  # fmt: skip
@draws(25)
def test_no_plan_exceeds_its_budget_or_ignores_a_wish(
    total: int, held: float, os: str, gpus: int, wishes: Wishes
) -> None:
    on = machine(total * MIB, int(total * MIB * held), os=os, gpus=gpus)  # type: ignore[arg-type]
    plan = solve(CATALOGUE, on, wishes)
    for choice in (plan.choice, *plan.runners_up):
        if choice is None:
            continue
        model, chosen = choice.option.model, choice.settings
        again = footprint(model, chosen, choice.budget.device)
        assert again.total_bytes == choice.footprint.total_bytes <= choice.budget.usable_bytes
        assert choice.budget.usable_bytes <= on.gpus[0].free_bytes
        assert wishes.backend in ("auto", chosen.engine)
        assert wishes.context is None or chosen.context == wishes.context
        assert chosen.concurrency == wishes.concurrency
        assert chosen.images * choice.tokens < chosen.context
        if wishes.images:
            assert choice.tokens >= wishes.least_image_tokens
    for rejection in plan.rejections:
        assert rejection.short_bytes > 0
        assert rejection.blame_bytes > 0
        assert rejection.blame


@given(
    total=st.integers(4 * 1024, 48 * 1024),
    gpus=st.sampled_from([1, 2]),
    led=st.booleans(),
    wishes=wishes_strategy,
)
@example(8046, 1, True, Wishes())  # coarser weights reach what finer ones don't
@example(22149, 1, False, Wishes(purpose="documents"))  # another engine is a runner-up
@draws(10)
def test_to_search_the_outdone_as_well_changes_no_plan(
    total: int, gpus: int, led: bool, wishes: Wishes
) -> None:
    on, candidates = machine(total * MIB, gpus=gpus), CATALOGUE if led else CATALOGUE[4:5]
    plan = solve(candidates, on, wishes)
    with mock.patch.object(solver, "_outdone", return_value=False):
        assert solve(candidates, on, wishes) == plan


def test_the_outdone_are_not_searched() -> None:
    with mock.patch.object(solver, "_choice", wraps=solver._choice) as brought:
        solve(CATALOGUE, machine(24 * GIB), Wishes(), reasons=False)
        few = brought.call_count
        with mock.patch.object(solver, "_outdone", return_value=False):
            solve(CATALOGUE, machine(24 * GIB), Wishes(), reasons=False)
    assert brought.call_count - few > 2 * few


@given(free=st.integers(0, 200 * 1024))
def test_a_budget_grows_with_free_memory_and_keeps_more_away_under_wsl2(free: int) -> None:
    def usable(count: int, os: str) -> int:
        return budgets(machine(200 * GIB, 200 * GIB - count * MIB, os=os))[0].usable_bytes  # type: ignore[arg-type]

    assert usable(free, "linux") <= usable(free + 1, "linux")
    assert usable(free, "wsl2") <= usable(free + 1, "wsl2")
    assert usable(free, "wsl2") <= usable(free, "linux")
    assert usable(free, "wsl2") <= free * MIB * 0.9 + 1


def test_the_first_card_a_user_asks_about() -> None:
    plan = one("4B")
    choice = require(plan)
    assert (choice.settings.engine, choice.settings.weights) == ("native", "fp8")
    assert choice.tokens >= 2048
    assert any("16,384-token images" in rejection.text for rejection in plan.rejections)
    assert plan.runners_up[0].settings.engine == "vllm"


def test_parts_in_int8_come_where_they_make_room_and_say_so() -> None:
    plan = one("4B", on=rtx_5060(1500 * MIB))
    choice = require(plan)
    assert choice.settings.weights_name == "fp8 (embedding, lm_head and vision tower in int8)"
    refused = next(rejection for rejection in plan.rejections if "the vision tower in bf16" in rejection.text)
    assert refused.blame == "weights"
    bf16 = choice.settings._replace(vision_weights="bf16")
    assert footprint(choice.option.model, bf16, choice.budget.device).total_bytes > choice.budget.usable_bytes
    assert require(one("4B", on=machine(64 * GIB))).settings.weights_name == "fp8"


def test_a_tower_in_int8_brings_the_8b_onto_the_first_card() -> None:
    choice = require(one("8B", False))
    assert choice.settings.weights_name == "int4 (embedding, lm_head and vision tower in int8)"
    assert (choice.tokens, choice.settings.context >= 4096) == (2048, True)


def test_formats_that_nobody_notices_never_cost_images_or_context() -> None:
    """By measured cost int8, FP8 and bf16 are alike; int4 is not, and comes only for comfort."""
    for fp8 in (False, True):
        sizes = [require(one("8B", fp8, on=machine(size * GIB))) for size in (16, 17, 20, 24, 32, 48)]
        reached = [(each.tokens, each.settings.context) for each in sizes]
        assert reached == sorted(reached)
        assert "int4" not in {each.settings.weights for each in sizes}
    tight = require(one("8B", False, on=machine(7 * GIB)))
    assert tight.settings.weights == "int4"


def test_weights_and_memory_that_are_wished() -> None:
    for weights in ("bf16", "int8", "int4"):
        wished = require(one("4B", False, Wishes(weights=weights, backend="native"), machine(24 * GIB)))  # type: ignore[arg-type]
        assert wished.settings.weights == weights
    assert one("4B", False, Wishes(weights="fp8", backend="native"), machine(24 * GIB)).choice is None
    limited = require(one("4B", wishes=Wishes(memory_bytes=4400 * MIB), on=machine(24 * GIB)))
    assert limited.footprint.total_bytes <= 4400 * MIB
    assert limited.settings.weights == "int4"
    with pytest.raises(RequestError, match="memory_bytes must be at least 1"):
        Wishes(memory_bytes=0)


def test_on_a_cpu_low_bits_come_by_wish_alone() -> None:
    host = replace(machine(GIB), gpus=())
    assert require(one("4B", on=host)).settings.weights == "bf16"
    chosen = require(one("4B", wishes=Wishes(weights="int4"), on=host)).settings
    assert (chosen.weights, chosen.head) == ("int4", "bf16")
    assert require(one("2B", wishes=Wishes(weights="bf16"), on=host)).settings.weights == "fp32"


def test_the_next_step_does_not_fit() -> None:
    """What is refused as too much is, and what is said to fit does."""
    plan = one("4B")
    choice = require(plan)
    remedy = next(r.remedy for r in plan.rejections if "16,384-token images" in r.text)
    assert f"{choice.tokens:,} tokens" in str(remedy)
    more = choice.settings._replace(pool_tokens=choice.settings.kv_tokens + 2048)
    needed = footprint(choice.option.model, more, choice.budget.device).total_bytes
    assert needed > choice.budget.usable_bytes or more.pool_tokens > 131_072


def test_nothing_fits_says_how_much_is_missing_and_the_way_out() -> None:
    plan = one("8B", on=rtx_5060(2600 * MIB))
    assert plan.choice is None
    with pytest.raises(
        DoesNotFit, match=r"8B-Instruct-FP8 does not fit .* int4 .* \(weights 4\.67 GiB.* more than the"
    ):
        require(plan)
    with pytest.raises(DoesNotFit, match=r"it fits with --context \d+"):
        require(one("4B", wishes=Wishes(context=65536)))
    with pytest.raises(DoesNotFit, match=r"it fits with --max-pixels \d+"):
        require(one("4B", wishes=Wishes(max_pixels=16_777_216), on=rtx_5060(3200 * MIB)))
    with pytest.raises(
        DoesNotFit, match=r"it fits when other programs give [\d,]+ MiB back, of 4.79 GiB that they hold"
    ):
        require(solve([Candidate(FACTS["4B", True])], rtx_5060(4900 * MIB), Wishes()))


def test_a_better_model_is_chosen_as_soon_as_it_fits() -> None:
    names = [
        require(solve(CATALOGUE, machine(size * GIB), Wishes())).option.model.name for size in (8, 16, 32)
    ]
    assert [name.split("-")[2] for name in names] == ["8B", "8B", "8B"]
    assert names[2] == "Qwen/Qwen3-VL-8B-Instruct-FP8", "of two that do the same, the smaller download"


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_prequantized_integers_that_our_engine_can_not_run_say_so(form: Any) -> None:
    foreign = replace(FACTS["2B", False], native=False, quantization=form)
    plan = solve([Candidate(foreign)], machine(12 * GIB), Wishes(backend="native"))
    assert plan.choice is None
    reasons = [refusal.text for refusal in plan.refusals]
    assert reasons == [f"our engine does not run this qwen3_vl in the {form} form that it is stored in"]


def test_quality_is_a_floor() -> None:
    assert require(solve(CATALOGUE, machine(12 * GIB), Wishes(quality="fp8"))).option.stored_quality == "fp8"
    chosen = require(solve(CATALOGUE, machine(12 * GIB), Wishes(quality="bf16")))
    assert chosen.option.stored_quality == "bf16"
    assert "4B" in chosen.option.model.name


def test_grounding_keeps_1024_tokens() -> None:
    assert Wishes(task="detect").least_image_tokens == 1024
    tight, wide = rtx_5060(2560 * MIB), Wishes(quality="fp8")
    small = replace(wide, tower="resident")
    assert require(solve([Candidate(FACTS["4B", True])], tight, small)).tokens < 1024
    plan = solve([Candidate(FACTS["4B", True])], tight, Wishes(task="detect", quality="fp8"))
    assert plan.choice is None or plan.choice.tokens >= 1024


def test_an_older_gpu_without_fused_attention_needs_more() -> None:
    wishes = Wishes(backend="transformers", context=2048, max_pixels=1_048_576)
    new = require(one("2B", False, wishes, machine(12 * GIB)))
    old = require(one("2B", False, wishes, machine(12 * GIB, capability=(7, 5))))
    assert old.footprint.total_bytes > new.footprint.total_bytes + 512 * MIB


def test_several_gpus_share_what_one_can_not_hold() -> None:
    plan = solve([Candidate(FACTS["8B", False])], machine(12 * GIB, gpus=2), Wishes(weights="bf16"))
    choice = require(plan)
    assert (choice.settings.engine, choice.settings.tensor_parallel) == ("vllm", 2)
    assert [gpu.index for gpu in choice.gpus] == [0, 1]


def test_without_a_gpu_host_memory_is_planned() -> None:
    choice = require(solve([Candidate(FACTS["2B", False])], replace(machine(GIB), gpus=()), Wishes()))
    assert (choice.settings.engine, choice.settings.weights, choice.gpus) == ("native", "fp32", ())
    assert "(fp32)" in next(part.why for part in choice.footprint.components if part.name == "KV cache")
    assert choice.speed.assumed
    assert choice.speed.decode_tokens_per_s is not None, "every plan has a speed"


def test_a_measured_context_replaces_the_default() -> None:
    on = machine(12 * GIB, context_bytes=300 * MIB)
    context = require(one("2B", on=on)).footprint.components[0]
    assert (context.nbytes, context.basis) == (300 * MIB, "measured")


def test_models_with_one_image_size_and_without_images() -> None:
    fixed = require(solve([Candidate(with_rule(FACTS["2B", False], Fixed()))], machine(12 * GIB), Wishes()))
    assert (fixed.tokens, fixed.settings.max_pixels) == (256, None)
    text = require(solve([Candidate(text_only(FACTS["2B", False]))], machine(12 * GIB), Wishes()))
    assert (text.tokens, text.settings.images) == (0, 0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"images": -1}, "images must be at least 0"),
        ({"context": 0}, "context must be at least 1"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"images": 0, "task": "detect"}, "boxes need an image"),
        ({"images": 0, "purpose": "detect"}, "boxes need an image"),
        ({"context": 512, "images": 4}, "can't hold 4 image"),
    ],
)
def test_wishes_that_can_not_be(bad: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Wishes(**bad)  # type: ignore[arg-type]


def test_what_a_model_can_not_do_is_not_planned() -> None:
    text = solve([Candidate(text_only(FACTS["2B", False]))], machine(12 * GIB), Wishes(purpose="detect"))
    assert text.choice is None
    assert any("reads no images" in refusal.text for refusal in text.refusals)
    blind = one("2B", wishes=Wishes(min_image_tokens=99_999_999), on=machine(48 * GIB))
    assert blind.choice is None
    assert any("its largest image has" in refusal.text for refusal in blind.refusals)
    volta = one("2B", on=machine(16 * GIB, capability=(7, 0)))
    assert any("older than 7.5" in refusal.text for refusal in volta.refusals if refusal.engine == "native")


def test_nobody_is_led_to_what_nobody_would_wait_for() -> None:
    host = replace(machine(GIB), gpus=())
    led = require(solve(CATALOGUE, host, Wishes()))
    assert "2B" in led.option.model.name
    assert led.speed.decode_tokens_per_s is not None
    assert led.speed.most is not None
    assert led.speed.most >= 5
    named = require(one("8B", on=replace(host, ram_free_bytes=30 * GIB)))
    assert named.speed.decode_tokens_per_s is not None


def test_low_bits_before_host_memory_and_other_editions_by_name() -> None:
    from snugvl.checkpoint.read import facts_of
    from snugvl.hardware.describe import describe
    from snugvl.planner.recommend import with_instead

    card = describe("rtx-4090")
    for name, weights in (("google/gemma-3-12b-it", "int8"), ("google/gemma-3-27b-it", "int4")):
        choice = require(solve([Candidate(facts_of(name, offline=True))], card, Wishes()))
        assert (choice.settings.weights, choice.option.offload) == (weights, False)
        assert "bitsandbytes" in str(choice.option.needs)
    pair = describe("rtx-3090", count=2)
    large = facts_of("Qwen/Qwen3-VL-32B-Instruct", offline=True)
    plan = with_instead(solve([Candidate(large)], pair, Wishes(backend="vllm")), pair)
    assert plan.choice is None
    with pytest.raises(DoesNotFit, match="Qwen3-VL-32B-Instruct-FP8 fits, in fp8"):
        require(plan)


def test_a_limit_that_somebody_set_is_what_to_raise() -> None:
    tight = one("8B", wishes=Wishes(memory_bytes=4 * GIB), on=machine(24 * GIB))
    with pytest.raises(DoesNotFit, match=r"it fits with --memory \d+[GM]iB"):
        require(tight)


def test_each_purpose_gets_what_it_is_for() -> None:
    """On one card: documents the largest images, batch the most in flight, chat several conversations."""
    found = {
        name: require(one("4B", wishes=Wishes(purpose=name)))  # type: ignore[arg-type]
        for name in ("chat", "documents", "detect", "batch")
    }
    tokens = {name: choice.tokens for name, choice in found.items()}
    assert tokens["documents"] > tokens["chat"] > tokens["batch"]
    assert tokens["detect"] > tokens["batch"]
    assert found["documents"].settings.context > found["batch"].settings.context
    whole = {name: choice.settings.kv_tokens / choice.settings.context for name, choice in found.items()}
    assert whole["batch"] > whole["chat"] > whole["documents"]  # conversations that the cache holds


def test_what_is_beyond_comfort_is_not_bought_with_speed() -> None:
    beyond = 0
    model, wishes = inventory(FACTS["4B", True]), Wishes(backend="native")
    for size in range(20, 96):
        found = budgets(machine(size * GIB // 4))
        fitter = Fitter(options(model, found[0].device, "linux", wishes)[0][0], wishes, found)
        best = fitter.best
        if best is None:
            continue
        if fitter.goal(best).step[:3] > COMFORT["chat"][:3]:
            beyond += 1
            assert (best.settings.chunk, best.settings.eager) == (NATIVE_STEPS[0][0], False), size
    assert beyond > 5


def test_with_a_fixed_context_the_pool_grows_on_where_images_end() -> None:
    choice = one("4B", wishes=Wishes(context=4096), on=machine(16 * GIB)).choice
    assert choice is not None
    assert choice.settings.context == 4096
    # An image of more tokens would leave no room for text; more conversations have theirs.
    assert choice.settings.pool_tokens == max(pool for _, _, pool, _ in STEPS["chat"])


@pytest.mark.parametrize("vram", [2, 6, 12])
def test_a_choice_is_the_same_without_the_reasons(vram: int) -> None:
    """What is left out of a plan that nobody prints decides nothing."""
    candidates, there = CATALOGUE, machine(vram * GIB)
    plan = solve(candidates, there, Wishes())
    brief = solve(candidates, there, Wishes(), reasons=False)
    assert brief.choice == plan.choice == choice_for(candidates, there, Wishes())
    assert plan.verdicts or plan.rejections
    assert (brief.rejections, brief.verdicts, brief.other_tower) == ((), (), None)


def test_something_fits_where_there_is_a_best() -> None:
    """`Fitter.any` is known without the best."""
    model, found = inventory(FACTS["4B", False]), set[bool]()
    for gib in (1, 2, 3, 4, 5, 6, 8):
        budget = budgets(machine(gib * GIB))
        for option in options(model, budget[0].device, "linux", Wishes())[0]:
            fitter = Fitter(option, Wishes(), budget)
            found.add(fitter.any)
            assert fitter.any == (Fitter(option, Wishes(), budget).best is not None)
    assert found == {True, False}
