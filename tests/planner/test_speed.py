"""The speed that a plan says, with its range, beside every speed that was measured or published."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Gpu
from snugvl.planner.budget import gpu_budget, host_budget
from snugvl.planner.engines import rules_of
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import ENGINES, Settings
from snugvl.planner.speed import Speed, rate_text, roofline, speed_text
from tests.planner import planned_speed
from tests.planner.planned_speed import Row, held, planned, rows, within

RESULTS = Path(__file__).parents[2] / "benchmarks/results/planned_speed.md"
NOW = [row for row in rows() if row.code != "before"]
VL_8B, VL_4B = "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"


def of(card: str | Gpu, model: str = VL_8B, *, engine: str = "native", **settings: object) -> Speed:
    gpu = describe(card).gpus[0] if isinstance(card, str) else card
    facts = catalogue_facts(model)
    assert facts is not None
    chosen = Settings(**{"engine": engine, "weights": "int4", "eager": False} | settings)  # type: ignore[arg-type]
    return roofline(inventory(facts), chosen, gpu_budget(gpu, "linux"))


def rate(speed: Speed) -> float:
    assert speed.decode_tokens_per_s is not None
    return speed.decode_tokens_per_s


def test_every_row_of_our_engine_lies_within_the_range_of_its_plan() -> None:
    ours = [row for row in NOW if row.engine == "native"]
    assert len(ours) >= 42
    assert [row for row in ours if not within(row, planned(row))] == []


def test_nine_of_ten_rows_of_all_engines_do() -> None:
    inside = sum(within(row, planned(row)) for row in NOW)
    assert inside >= 0.9 * len(NOW)
    # The four are of one machine, on which llama.cpp had two thirds of what it had on another of the kind.
    assert {row.source for row in NOW if not within(row, planned(row))} == {"h200/llamacpp_speed.json"}


@pytest.mark.parametrize("row", [row for row in NOW if row.code == "published"], ids=lambda row: row.place)
def test_what_people_publish_is_predicted(row: Row) -> None:
    assert 1 / 1.3 < rate(planned(row)) / row.per_s < 1.3


@pytest.mark.parametrize(
    "row", [row for row in NOW if "35B-A3B" in row.model], ids=lambda row: f"{row.engine} {row.place}"
)
def test_a_mixture_is_predicted_wherever_its_experts_are(row: Row) -> None:
    """On the GPU, in slots of a cache by how often they are found there, on the processor."""
    assert 1 / 1.3 < rate(planned(row)) / row.per_s < 1.3


@pytest.mark.parametrize("row", [row for row in NOW if row.read_rate], ids=lambda row: row.place)
def test_few_multiprocessors_are_predicted_from_the_arithmetic(row: Row) -> None:
    """By bytes alone a step of 30 multiprocessors would take a third to three quarters of the time."""
    found = planned(row)
    assert not found.measured
    assert 0.85 < rate(found) / row.per_s < 1.2
    gpu = held(describe(row.card).gpus[0], row)
    alone = roofline(
        planned_speed.model_of(row.model),
        Settings("native", weights=row.weights, head=row.head, context=2 * row.tokens, images=0, eager=False),  # type: ignore[arg-type]
        gpu_budget(replace(gpu, cycles_per_s=None), "linux"),
    )
    assert rate(alone) / row.per_s > 1.3


def test_the_page_of_results_is_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert RESULTS.read_text(encoding="utf-8") == planned_speed.page()


@pytest.mark.parametrize("engine", ENGINES)
def test_cards_are_called_measured_that_have_rows(engine: str) -> None:
    cards = {row.card for row in NOW if row.engine == engine and row.card != "none" and not row.units}
    machines = (describe(card, os="macos" if card.startswith("M") else "linux") for card in cards)
    names = {(machine.gpus or machine.others)[0].name for machine in machines}
    assert rules_of(engine).pace.cards == names


def test_a_card_that_nobody_has_measured_has_the_wider_range_and_says_so() -> None:
    known, unknown = of("h100"), of("rtx-5060")
    assert (known.measured, unknown.measured) == (True, False)
    width = [each.most / each.least for each in (known, unknown) if each.most and each.least]
    assert width[0] == pytest.approx(1.25**2)
    same = replace(describe("h100").gpus[0], name="NVIDIA H100 of another kind")
    other = of(same)
    assert (other.most or 0.0) / (other.least or 1.0) > width[0]
    text = speed_text(unknown)
    assert text is not None
    ends = f"{unknown.least:.0f} to {unknown.most:.0f}"
    assert text.startswith(f"about {rate(unknown):.0f} tokens/s ({ends}, computed")
    assert "nobody has measured this card" in text
    assert "as measured on this card" in (speed_text(known) or "")


@pytest.mark.parametrize("card", ["rtx-5060", "rtx-3060", "rtx-2060", "rtx-4090", "h200", "l4", "t4", "a100"])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int6", "int5", "int4"])
@pytest.mark.sample(
    *(f"{weights}-rtx-5060" for weights in ("bf16", "fp8", "int8", "int6", "int5", "int4")),
    *(f"int4-{card}" for card in ("rtx-3060", "rtx-2060", "rtx-4090", "h200", "l4", "t4", "a100")),
)
def test_the_middle_lies_in_the_range_and_below_what_memory_allows(card: str, weights: str) -> None:
    model = f"{VL_4B}-FP8" if weights == "fp8" else VL_4B
    gpu = describe(card).gpus[0]
    found = of(card, model, weights=weights)
    assert gpu.bandwidth
    assert (found.least or 0.0) < rate(found) < (found.most or 0.0)
    faster = of(replace(gpu, name="another", bandwidth=2 * gpu.bandwidth), model, weights=weights)
    assert rate(faster) > rate(found)
    bound = of(replace(gpu, name="another", cycles_per_s=None), model, weights=weights)
    assert rate(found) <= (bound.most or 0.0)


def test_more_multiprocessors_help_what_is_unpacked_alone() -> None:
    gpu = replace(describe("rtx-5060").gpus[0], name="another")
    assert gpu.cycles_per_s
    more = replace(gpu, cycles_per_s=2 * gpu.cycles_per_s)
    assert rate(of(more)) > 1.01 * rate(of(gpu))
    assert rate(of(more, weights="bf16")) == rate(of(gpu, weights="bf16"))


def test_nothing_is_said_of_a_card_whose_bandwidth_is_unknown() -> None:
    found = of(Gpu(0, "NVIDIA Unheard Of", 8 << 30, 8 << 30, (12, 0)))
    assert (found.decode_tokens_per_s, found.least, found.most, speed_text(found)) == (None,) * 4


def test_experts_that_are_not_read_cost_no_time() -> None:
    """A token of 35B-A3B reads 8 of 256 experts of a layer."""
    mixture = of("h100", "Qwen/Qwen3.6-35B-A3B")
    assert rate(mixture) > 1.5 * rate(of("h100", "Qwen/Qwen3.6-27B"))


def test_without_a_gpu_more_cores_are_faster_and_quantised_weights_slower() -> None:
    def on(cores: int, **settings: object) -> float:
        facts = catalogue_facts(VL_4B)
        assert facts is not None
        machine = replace(describe("none", ram="64GiB"), cpu_cores=cores)
        chosen = Settings(**{"engine": "native", "weights": "bf16"} | settings)  # type: ignore[arg-type]
        found = roofline(inventory(facts), chosen, host_budget(machine))
        assert "assumed rates of host memory" in (speed_text(found) or "")
        return rate(found)

    assert on(2) < on(8) < on(16)
    assert on(64) == on(16), "memory ends it"
    assert on(2, weights="int4") < on(2)


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (7.93, "7.9"), (9.96, "10"), (79.4, "79"), (1234.0, "1,234")]
)
def test_a_rate_for_people(value: float, text: str) -> None:
    assert rate_text(value) == text


def test_rows_say_where_they_are_from() -> None:
    results, log = RESULTS.parent, (RESULTS.parents[1] / "LOG.md").read_text(encoding="utf-8").lower()
    for row in rows():
        if row.source.endswith((".json", ".txt")):
            assert (results / row.source).is_file(), row
        elif row.source.startswith("LOG: "):
            assert row.source.removeprefix("LOG: ").lower() in log, row
    assert Counter(row.code for row in rows()).keys() == {"now", "before", "published"}
