"""Which engine a plan takes and what it says of the others; language only; copies on several GPUs."""

from dataclasses import replace

import pytest

from snugvl.errors import RequestError
from snugvl.planner.commands import plain_command
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.footprint.weights import part_bytes, weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Plan
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.settings import Settings
from snugvl.planner.shortfall import why_engine
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, MIB, machine
from tests.planner.models import qwen3_vl, text_only

FOREIGN = replace(qwen3_vl("2B"), native=False, family="gemma3")
HOST = replace(machine(GIB), gpus=())


def planned(facts: object, on: object, wishes: Wishes | None = None, **rest: object) -> Plan:
    return solve([Candidate(facts)], on, wishes or Wishes(), **rest)  # type: ignore[arg-type]


def test_our_own_engine_comes_first_and_says_so() -> None:
    plan = planned(qwen3_vl("2B"), machine(16 * GIB))
    assert why_engine(plan) == "native: our own engine runs the qwen3_vl family, and is preferred"
    assert {verdict.engine for verdict in plan.verdicts} == {"transformers", "vllm", "llamacpp"}
    text = plain(report(plan, machine(16 * GIB)))
    assert "not vllm: it fits as well; the chosen one is preferred" in text
    values = document(plan, machine(16 * GIB))
    assert values["why"] == why_engine(plan)
    assert {entry["engine"] for entry in values["engines"]} == {"transformers", "vllm", "llamacpp"}


def test_two_gpus_that_share_are_the_reason_for_vllm() -> None:
    plan = planned(qwen3_vl("8B"), machine(12 * GIB, gpus=2), Wishes(weights="bf16"))
    assert why_engine(plan) == "vllm: 2 GPUs share what one can't hold"
    native = next(verdict for verdict in plan.verdicts if verdict.engine == "native")
    assert "more than may be used" in native.text or "only" in native.text


def test_a_family_that_is_not_ours_goes_to_another_engine_with_the_reason() -> None:
    plan = planned(FOREIGN, machine(16 * GIB))
    assert why_engine(plan) == "vllm: our engine does not run the gemma3 family yet"
    old = planned(FOREIGN, machine(16 * GIB, capability=(7, 0)))
    assert old.choice is None
    told = {refusal.engine: refusal.text for refusal in old.refusals}
    assert told["vllm"] == told["transformers"] == "compute capability 7.0 is older than 7.5"


def test_what_is_not_installed_is_not_chosen() -> None:
    missing = {"vllm": "vLLM is not installed here: pip install 'snugvl[vllm]'"}
    plan = planned(FOREIGN, machine(16 * GIB), missing=missing)
    assert require(plan).option.engine == "transformers"
    assert any("pip install" in verdict.text for verdict in plan.verdicts)
    alone = planned(FOREIGN, machine(16 * GIB), Wishes(backend="vllm"), missing=missing)
    assert alone.choice is None
    assert "pip install 'snugvl[vllm]'" in alone.refusals[0].text


def test_on_a_cpu_transformers_runs_what_ours_does_not() -> None:
    choice = require(planned(FOREIGN, HOST))
    assert (choice.option.engine, choice.settings.weights) == ("transformers", "fp32")
    tight = replace(HOST, ram_free_bytes=12 * GIB)
    assert require(planned(FOREIGN, tight)).settings.weights == "bf16"
    assert require(planned(qwen3_vl("2B"), HOST)).option.engine == "native"
    asked = require(planned(qwen3_vl("2B"), HOST, Wishes(backend="transformers")))
    assert asked.option.engine == "transformers"


def test_float32_takes_twice_of_everything() -> None:
    model = inventory(FOREIGN)
    narrow, wide = (
        footprint(
            model, Settings("transformers", weights, context=2048, max_pixels=1 << 20), Device(0, cpu=True)
        )
        for weights in ("bf16", "fp32")
    )  # fmt: skip
    for name in ("weights: ", "KV cache", "prefill workspace", "vision workspace"):
        assert wide.named(name) == pytest.approx(2 * narrow.named(name), rel=0.01)


def test_prequantized_weights_are_tried_and_say_what_they_need() -> None:
    packed = replace(qwen3_vl("2B"), native=False, quantization="int4")
    plan = planned(packed, machine(8 * GIB), Wishes(backend="transformers"))
    assert require(plan).settings.weights == "int4"
    assert "It needs the package that made the int4 weights" in plain(report(plan, machine(8 * GIB)))


@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4.5)])
def test_low_bits_of_bitsandbytes_come_by_wish(weights: str, bits: float) -> None:
    wishes = Wishes(backend="transformers", weights=weights)  # type: ignore[arg-type]
    plan = planned(FOREIGN, machine(16 * GIB), wishes)
    choice = require(plan)
    assert choice.settings.weights == weights
    assert "bitsandbytes" in plain(report(plan, machine(16 * GIB)))
    decoder = 28 * (2048 * 2048 * 2 + 2 * 2048 * 1024 + 3 * 2048 * 6144)
    saved = weight_bytes(choice.option.model, Settings("transformers")) - weight_bytes(
        choice.option.model, choice.settings
    )
    assert saved == pytest.approx(decoder * (2 - bits / 8), rel=0.01)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(backend="vllm", weights="int4"), "vLLM serves what is stored, bf16"),
        (Wishes(backend="transformers", weights="fp8"), "fp8 weights can't be made of it"),
    ],
)
def test_weights_that_an_engine_can_not_have_are_refused_by_name(wishes: Wishes, words: str) -> None:
    plan = planned(qwen3_vl("2B"), machine(16 * GIB), wishes)
    assert plan.choice is None
    assert words in plan.refusals[0].text


@pytest.mark.parametrize("backend", ["native", "transformers", "vllm"])
def test_language_only_leaves_the_tower_out_and_says_what_that_frees(backend: str) -> None:
    on = machine(16 * GIB)
    wishes = Wishes(images=0, language_only=True, backend=backend)  # type: ignore[arg-type]
    plan = planned(qwen3_vl("2B"), on, wishes)
    choice = require(plan)
    assert choice.settings.language_only
    assert choice.footprint.named("weights: vision") == choice.footprint.named("vision") == 0
    tower = part_bytes(choice.option.model, Settings(backend), "vision")  # type: ignore[arg-type]
    assert f"without the vision tower {tower / MIB:.0f} MiB of weights" in plain(report(plan, on))


def test_language_only_makes_room() -> None:
    tight = machine(int(3.95 * GIB))
    wishes = Wishes(images=0, backend="native", quality="bf16")
    assert planned(qwen3_vl("2B"), tight, replace(wishes, tower="resident")).choice is None
    assert planned(qwen3_vl("2B"), tight, replace(wishes, language_only=True)).choice is not None


def test_language_only_with_images_contradicts_itself() -> None:
    with pytest.raises(RequestError, match="takes no images; you asked for 1 a request"):
        Wishes(language_only=True)
    text = require(
        planned(text_only(qwen3_vl("2B")), machine(16 * GIB), Wishes(images=0, language_only=True))
    )
    assert not text.settings.language_only  # there is no tower to leave out


def test_copies_where_requests_ask_for_them() -> None:
    on, facts = machine(16 * GIB, gpus=2), qwen3_vl("2B")
    few = require(
        planned(facts, on, Wishes(backend="vllm", context=32768, max_pixels=1 << 20, concurrency=2))
    )
    assert few.settings.gpus == 1
    many = Wishes(backend="vllm", context=32768, max_pixels=1 << 20, concurrency=4)
    choice = require(planned(facts, on, many))
    assert (choice.settings.data_parallel, choice.settings.tensor_parallel) == (2, 1)
    assert choice.settings.concurrency_of_copy == 2
    assert "--data-parallel-size 2" in str(plain_command(choice))
    alone = footprint(
        choice.option.model, choice.settings._replace(concurrency=2, data_parallel=1), choice.budget.device
    )
    assert choice.footprint.total_bytes == alone.total_bytes
    assert "2 copies (data parallel)" in plain(report(planned(facts, on, many), on))
    assert require(planned(qwen3_vl("8B"), machine(12 * GIB, gpus=2))).settings.data_parallel == 1


def test_a_context_that_only_others_run() -> None:
    facts = replace(qwen3_vl("2B"), native_positions=4096)
    assert require(planned(facts, machine(16 * GIB), Wishes(backend="native"))).settings.context == 4096
    plan = planned(facts, machine(24 * GIB), Wishes(context=8192))
    assert require(plan).option.engine == "vllm"
    assert why_engine(plan) == (
        "vllm: its context ends at 4,096 tokens here, 8,192 are asked for; transformers goes up to 262,144"
    )
