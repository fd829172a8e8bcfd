"""Mixtures of experts: what stays in host memory, how fast that is, who is led to it, and what is refused."""

import shlex
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from snugvl.backends.llamacpp.settings import arguments_of
from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.core.sizes import GIB, parse_size
from snugvl.errors import InputError
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Machine, ddr_bandwidth
from snugvl.planner.budget import host_budget
from snugvl.planner.commands import beside_gpu_bytes, plain_command
from snugvl.planner.engines.llamacpp.footprint import host_bytes
from snugvl.planner.footprint.total import footprint
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.recommend import LEAST_BESIDE, catalogue_candidates, planned
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.speed import Speed, copy_rate, roofline, speed_text, step_reads
from snugvl.planner.wishes import Wishes
from tests.planner.mixtures import Q3, Q4, ROWS, Row, predicted


# Published decode tokens a second (the project's anchors): card, kind of host memory if known, file, rate.
# IQ3 isn't planned from shapes, Q3_K_M is nearest; of a file that nobody named the two are tried.
def named(model: str, machine: Machine, **wishes: Any) -> Plan:
    facts = catalogue_facts(model)
    assert facts is not None
    return planned([Candidate(facts)], machine, Wishes(**wishes))


def led(machine: Machine, **wishes: Any) -> Plan:
    return planned(catalogue_candidates(), machine, Wishes(**wishes))


def text(plan: Plan, machine: Machine) -> str:
    return plain(report(plan, machine, pull=True))


# What is said of the machine of the others is not enough (`benchmarks/results/mixtures.md`).
HELD = [row for row in ROWS if row.published and (row.card != "RTX 5070" or row.whole or row.experts)]


@pytest.mark.parametrize(
    "row", HELD, ids=lambda row: f"{row.card} {row.experts} {row.whole} {row.model[-6:]}"
)
@pytest.mark.sample("RTX 5060 Ti 16GB 14 False Q4_K_M", "RTX 5070 None True Q4_K_M")
def test_speed_is_what_people_publish(row: Row) -> None:
    """With the split of their commands; where nobody said the kind of host memory, by one that is sold."""
    speed = predicted(row).speed
    rate = speed.decode_tokens_per_s
    assert rate is not None
    least, most = (rate, rate) if speed.ddr is None else speed.ddr[1:]
    for published in row.published:
        assert published / 1.3 <= most
        assert least <= published * 1.3


def test_a_row_that_an_older_card_beats_is_not_reproduced() -> None:
    """RTX 5070, 30B-A3B: 25.7, where an RTX 2080 has 36.7. Split by layers, or with all experts in host
    memory, it falls to that; the plan's own split is quicker."""
    rows = [row for row in ROWS if (row.card, row.ddr) == ("RTX 5070", "DDR4-3200")]
    planned_way, layers, every = (predicted(row) for row in rows)
    assert (layers.settings.host_experts, every.settings.host_experts) == (0, 48)
    rates = [each.speed.decode_tokens_per_s or 0.0 for each in (planned_way, layers, every)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.3 * rates[1] > 1.3 * rates[2]


def test_four_channels_have_twice_the_bandwidth_of_two() -> None:
    assert ddr_bandwidth("4xDDR4-3200") == 2 * (ddr_bandwidth("DDR4-3200") or 0.0) == 102.4e9
    assert ddr_bandwidth("1xddr5-5600") == 44.8e9
    assert ddr_bandwidth("0xDDR4-3200") is ddr_bandwidth("xDDR4-3200") is None


def test_as_few_experts_leave_the_gpu_as_fit_to_the_byte() -> None:
    choice = require(named(Q4, describe("RTX 5060", ram="32GiB")))
    settings, model = choice.settings, choice.option.model
    assert 0 < settings.host_experts < 40
    assert (settings.offloaded, settings.vision) == (0, "gpu")
    assert choice.spare_bytes >= 0
    fewer = footprint(model, settings._replace(host_experts=settings.host_experts - 1), choice.budget.device)
    assert fewer.total_bytes > choice.budget.usable_bytes
    layer = fewer.total_bytes - choice.footprint.total_bytes
    assert beside_gpu_bytes(choice) == host_bytes(model, settings)
    one_more = settings._replace(host_experts=settings.host_experts + 1)
    assert host_bytes(model, one_more) - host_bytes(model, settings) == pytest.approx(layer, rel=0.2)
    assert host_bytes(model, settings) <= host_budget(describe("RTX 5060", ram="32GiB")).usable_bytes


def test_the_command_says_it_and_is_obeyed() -> None:
    choice = require(named(Q4, describe("RTX 3060 12GB", ram="32GiB")))
    words = shlex.split(plain_command(choice) or "")
    experts, steps = (words[words.index(flag) + 1] for flag in ("--n-cpu-moe", "-ub"))
    assert (experts, steps) == (str(choice.settings.host_experts), str(choice.settings.chunk))
    assert words[words.index("-ngl") + 1] == "41", "every layer, and the head"
    assert words[words.index("-b") + 1] == "2048"
    launched = arguments_of(choice)
    assert launched[launched.index("--n-cpu-moe") + 1] == experts


def test_steps_are_large_where_experts_cross_for_each_of_them() -> None:
    choice = require(named(Q4, describe("RTX 5060", ram="32GiB")))
    assert choice.settings.chunk == 2048
    gpu = choice.budget.gpu
    assert gpu is not None
    waits = [
        roofline(choice.option.model, choice.settings._replace(chunk=chunk), choice.budget).first_token_s
        for chunk in (2048, 512)
    ]
    assert all(waits)
    assert (waits[1] or 0) - (waits[0] or 0) == pytest.approx(
        3 * (host_bytes(choice.option.model, choice.settings) - 0.9 * GIB) / copy_rate(gpu), rel=0.1
    ), "of 2,112 tokens: five steps instead of two"
    whole = require(named(Q4, describe("RTX 3090", ram="32GiB")))
    assert (whole.settings.host_experts, whole.settings.chunk) == (0, 512)


def test_what_is_not_known_of_host_memory_is_said_with_the_range() -> None:
    unsaid = require(named(Q4, describe("RTX 4060 Ti 8GB", ram="32GiB"))).speed
    assert unsaid.ddr is not None
    kind, slow, quick = unsaid.ddr
    rate = unsaid.decode_tokens_per_s or 0
    assert kind == "DDR4-3200"
    assert slow < rate < quick
    assert "with DDR4-3200, which is assumed" in (speed_text(unsaid) or "")
    said = require(named(Q4, describe("RTX 4060 Ti 8GB", ram="32GiB", ddr="ddr4-3200"))).speed
    assert (said.ddr, said.decode_tokens_per_s) == (None, rate)
    assert "assumed" not in (speed_text(said) or "")
    spellings = "DDR5-5600", "ddr5 5600", "DDR5-5600 MT/s", "DDR5 5600MHz"
    assert {ddr_bandwidth(each) for each in spellings} == {89.6e9}
    assert isinstance(said, Speed)
    with pytest.raises(InputError, match="write it like DDR4-3200"):
        describe("RTX 5060", ram="32GiB", ddr="fast")


def test_slow_cores_are_slower_than_their_memory() -> None:
    machine = describe("RTX 5060", ram="32GiB", ddr="DDR5-6000")
    few, many = (
        require(named(Q4, replace(machine, cpu_cores=cores))).speed.decode_tokens_per_s or 0.0
        for cores in (2, 8)
    )
    assert few < 0.6 * many


ISSUE = {"os": "wsl2", "held": "951MiB"}


def test_eight_gigabytes_are_led_to_a_mixture_that_is_weighed_against_what_fits_whole() -> None:
    machine = describe("rtx-5060", ram="64GiB", **ISSUE)
    plan = led(machine)
    choice, beside = require(plan), plan.beside
    assert choice.option.model.name == Q4
    assert beside is not None
    assert beside.option.model.name == "Qwen/Qwen3.5-4B"
    assert (choice.speed.decode_tokens_per_s or 0) >= LEAST_BESIDE
    said = text(plan, machine)
    assert f"with the experts of {choice.settings.host_experts} of 40 layers in host memory, at about" in said
    assert "llamacpp: nothing here holds the model whole, and it can keep experts in host memory" in said
    assert "Without llama.cpp Qwen/Qwen3.5-4B runs whole on the GPU, at about" in said
    assert "tokens/s from 20.54 GiB of files, Qwen/Qwen3.5-4B in int8" in said
    assert "Qwen/Qwen3.5-9B in int4" in said, "why not that one: what is missing"
    assert "of 27.00 GiB that may be used. The experts are pages of the file, not pinned" in said
    assert ".wslconfig" not in said, "half of the PC's memory does"


@pytest.mark.parametrize("card", ["rtx-3060", "rtx-5060"])
def test_both_engines_are_said_where_ours_has_experts_in_host_memory_as_quickly(card: str) -> None:
    on = describe(card, held="300MiB", os="linux", ram="64GiB")
    plan = led(on)
    assert plan.choice is not None
    assert plan.choice.settings.engine == "llamacpp"
    ours = plan.ours
    assert ours is not None
    assert (ours.settings.engine, ours.settings.weights) == ("native", "int4")
    assert ours.settings.expert_slots
    assert (ours.speed.decode_tokens_per_s or 0) >= (plan.choice.speed.decode_tokens_per_s or 0) > 0
    written = text(plan, on)
    assert (
        "By snugvl's own engine Qwen/Qwen3.6-35B-A3B-FP8 runs, its experts in host memory as well" in written
    )
    command = "snugvl serve Qwen/Qwen3.6-35B-A3B-FP8 --backend native --weights int4 --experts cpu"
    assert command in written
    again = named("Qwen/Qwen3.6-35B-A3B-FP8", on, backend="native", weights="int4", experts="cpu").choice
    assert again is not None
    assert again.settings == ours.settings
    assert document(plan, on)["ours"]["settings"]["expert_slots"] == ours.settings.expert_slots


@pytest.mark.parametrize(
    ("system", "wishes"),
    [("wsl2", {}), ("linux", {"backend": "llamacpp"}), ("linux", {"experts": "gpu"})],
)
def test_ours_is_not_said_where_it_is_slow_or_not_asked_for(system: Any, wishes: dict[str, Any]) -> None:
    """Under WSL2 the host copies experts from memory that isn't page-locked."""
    on = describe("rtx-3060", held="300MiB", os=system, ram="128GiB")
    plan = named(Q4, on, **wishes)
    assert plan.choice is not None
    assert plan.choice.settings.host_experts
    assert plan.ours is None


def test_wsl2_has_half_of_the_pcs_memory_and_it_is_said_what_more_of_it_would_give() -> None:
    """The same PC, seen from within WSL2, has 16 GiB: a described one was planned with 32."""
    machine = describe("rtx-5060", ram="32GiB", **ISSUE)
    assert (machine.ram_total_bytes, machine.pc_ram_bytes) == (16 * GIB, 32 * GIB)
    plan = led(machine)
    assert require(plan).option.model.name == "Qwen/Qwen3.5-4B"
    assert plan.roomier is not None
    assert plan.roomier.option.model.name == Q4
    found = report(plan, machine, pull=True)
    remark = next(step.remark for step in found.steps if ".wslconfig" in step.remark)
    assert remark.startswith(f"With 21.00 GiB for WSL2 {Q4} runs, at about ")
    assert "WSL2 has 16.00 GiB of the PC's 32.00 GiB, half, unless .wslconfig says otherwise: " in remark
    assert r"in %UserProfile%\.wslconfig write [wsl2] and below it memory=21GB, then run wsl " in remark
    assert found.commands[:2] == ("snugvl pull Qwen/Qwen3.5-4B", "snugvl serve Qwen/Qwen3.5-4B")
    assert found.commands[2:] == (f"snugvl pull {Q4}", f"snugvl serve {Q4} --backend llamacpp")
    assert f"{Q4} gives about 56 tokens/s from 20.54 GiB of files, Qwen/Qwen3.5-4B in int8" in plain(found)
    assert document(plan, machine)["roomier"]["model"] == Q4
    given = describe("rtx-5060", ram="42GiB", **ISSUE)  # as WSL2 has then
    assert require(led(given)).option.model.name == Q4


def test_wsl2_is_not_told_to_take_what_windows_needs_or_what_no_pc_has() -> None:
    machine = describe("rtx-5060", ram="24GiB", **ISSUE)  # 20 GiB could be given, 21 are needed
    plan = led(machine)
    assert plan.roomier is not None
    assert plan.roomier.option.model.name == Q3
    assert led(describe("rtx-5060", ram="16GiB", **ISSUE)).roomier is None
    small = describe("rtx-5060", ram="20GiB", **ISSUE)
    way = "Way out: it fits with 21.00 GiB of host memory for WSL2, of a PC that has 25.00 GiB.\n"
    assert way in text(named(Q4, small), small)
    assert led(describe("rtx-5060", ram="32GiB")).roomier is None, "Linux has all of it"
    assert led(replace(machine, container=True)).roomier is None
    here = replace(machine, pc_ram_bytes=None, source="probed")  # a probe sees WSL2's part alone
    assert "WSL2 has 12.00 GiB, by default half of the PC's memory, unless " in text(led(here), here)
    named_there = named("Qwen/Qwen3.6-35B-A3B", describe("rtx-5060", ram="32GiB", **ISSUE))
    assert (require(named_there).option.model.name, named_there.named) == (Q3, "Qwen/Qwen3.6-35B-A3B")
    assert named_there.roomier is not None
    assert named_there.roomier.option.model.name == Q4


def test_what_runs_in_more_of_the_pcs_memory_alone_says_so() -> None:
    """A 7B in 16 bits without a GPU: it had been planned for all of the PC's memory."""
    machine = describe("none", os="wsl2", ram="32GiB")
    plan = named("Qwen/Qwen2.5-7B-Instruct", machine, images=0, weights="bf16")
    assert plan.choice is None
    assert plan.roomier is not None
    assert plan.roomier.option.model.name == "Qwen/Qwen2.5-7B-Instruct"
    assert " for WSL2 Qwen/Qwen2.5-7B-Instruct runs" in text(plan, machine)
    tight = describe("none", os="wsl2", ram="18GiB")
    assert named("Qwen/Qwen2.5-7B-Instruct", tight, images=0, weights="bf16").roomier is None


@pytest.mark.parametrize("ram", [None, "8GiB", "16GiB"])
@pytest.mark.sample("16GiB")
def test_little_host_memory_and_memory_that_nobody_spoke_of_change_no_plan(ram: str | None) -> None:
    machine = describe("rtx-5060", ram=ram, **ISSUE)
    plan = led(machine)
    assert require(plan).settings == require(solve(catalogue_candidates(), machine, Wishes())).settings
    assert plan.beside is None
    assert "host memory: " not in text(plan, machine).lower()


@pytest.mark.parametrize("wishes", [{"concurrency": 4}, {"purpose": "batch"}])
def test_many_requests_at_once_are_no_case_for_experts_in_host_memory(wishes: dict[str, Any]) -> None:
    assert led(describe("rtx-5060", ram="32GiB", **ISSUE), **wishes).beside is None


def test_nobody_is_led_to_files_that_the_disk_has_no_room_for() -> None:
    machine = replace(describe("rtx-5060", ram="64GiB", **ISSUE), disk_free_bytes=18 * GIB)
    assert require(led(machine)).option.model.name == Q3, "the smaller edition"
    machine = replace(machine, disk_free_bytes=10 * GIB)
    assert require(led(machine)).option.model.name == "Qwen/Qwen3.5-4B"


def test_the_smaller_edition_comes_where_host_memory_is_short() -> None:
    names = [
        require(led(describe("rtx-3060", ram=ram))).option.model.name for ram in ("12GiB", "16GiB", "24GiB")
    ]
    assert names == ["Qwen/Qwen3.5-9B", Q3, Q4]


def test_more_host_memory_never_takes_a_named_mixtures_comfort() -> None:
    """Random plans found it: with half a GiB more the larger file ran, with 2,048 tokens of context."""
    for card, held in (("rtx-3050", None), ("arc-b580", "4000MiB")):
        for ram in (None, "16.5GiB", "17GiB"):
            machine = describe(card, ram=ram, held=held)
            choice = require(named("Qwen/Qwen3-VL-30B-A3B-Instruct", machine))
            assert (choice.settings.context, choice.tokens) == (8192, 2048)


def test_a_named_mixture_that_fits_nowhere_is_planned_as_its_gguf() -> None:
    machine = describe("rtx-5060", ram="64GiB", **ISSUE)
    plan = named("Qwen/Qwen3.6-35B-A3B", machine)
    assert (require(plan).option.model.name, plan.named) == (Q4, "Qwen/Qwen3.6-35B-A3B")
    on_48_gb = named("Qwen/Qwen3.6-35B-A3B-FP8", describe("l40s", ram="64GiB"))
    assert (require(on_48_gb).option.engine, on_48_gb.named) == ("native", "")
    assert require(named("Qwen/Qwen3.5-35B-A3B-GPTQ-Int4", describe("rtx-5090"))).option.engine == "native"


def test_a_card_that_llama_cpp_alone_uses_is_told_of_one_file_once() -> None:
    """Random plans found it on a V100: the same file stood below itself."""
    machine = describe("v100", count=4, ram="128GiB")
    plan = named("Qwen/Qwen3.6-35B-A3B", machine)
    assert (require(plan).option.model.name, plan.beside) == (Q4, None)
    lines = [line for line in text(plan, machine).splitlines() if line.strip()]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("model", [Q4, "Qwen/Qwen3.6-35B-A3B"])
@pytest.mark.parametrize("system", ["linux", "wsl2"])
@pytest.mark.sample(f"linux-{Q4}", "wsl2-Qwen/Qwen3.6-35B-A3B")
def test_short_host_memory_is_refused_with_the_way_out(model: str, system: str) -> None:
    machine = describe("rtx-5060", os=system, held="951MiB", ram="26GiB" if system == "wsl2" else "12GiB")
    plan = named(model, machine)
    assert plan.choice is None
    said = text(plan, machine)
    assert "layers would have to stay in host memory: " in said
    assert "GiB may be used" in said
    way = said.partition("Way out: ")[2].splitlines()[0]
    size = way.partition("fits with ")[2].partition(" of host memory")[0]
    assert ("memory=" in way) == (system == "wsl2")
    assert way.startswith("it fits" if model == Q4 else f"as {Q3} it fits")
    whole = parse_size(size.replace(" ", "")) * (2 if system == "wsl2" else 1)
    enough = describe("rtx-5060", os=system, held="951MiB", ram=whole)
    assert named(model if model == Q4 else Q3, enough).choice is not None


def test_a_finer_edition_that_does_not_fit_says_which_does() -> None:
    machine = describe("rtx-4090", ram="16GiB")
    plan = named("ggml-org/Qwen3.6-35B-A3B-GGUF:Q8_0", machine)
    assert plan.choice is None
    assert "Way out: bartowski/Qwen_Qwen3.6-35B-A3B-GGUF:Q6_K fits" in text(plan, machine)


def test_more_memory_of_either_kind_never_slows_a_mixture() -> None:
    def rate(vram: str, ram: str) -> tuple[float, Choice]:
        choice = require(named(Q4, describe("rtx-5060", vram=vram, ram=ram)))
        return choice.speed.decode_tokens_per_s or 0.0, choice

    rates = [rate(f"{gib}GiB", "32GiB")[0] for gib in (6, 7, 8, 10, 12, 16, 20, 24)]
    assert all(after >= 0.97 * before for before, after in pairwise(rates))
    assert rates[-1] > 1.5 * rates[0]
    assert rate("8GiB", "24GiB")[1].settings == rate("8GiB", "64GiB")[1].settings


def test_a_mixture_that_fits_whole_is_our_engines() -> None:
    plan = named("Qwen/Qwen3.6-35B-A3B", describe("h100", ram="128GiB"))
    assert require(plan).option.engine == "native"
    assert "vllm" in {choice.option.engine for choice in plan.runners_up}
    said = next(each.text for each in plan.verdicts if each.engine == "llamacpp")
    assert said.startswith(f"it reads GGUF files, of which {Q4} gives about ")
    assert said.endswith(" tokens/s from 20.54 GiB of files"), "both engines are said"


@pytest.mark.parametrize(("ram", "before"), [("64GiB", 0), ("32GiB", 2)])
def test_llama_server_comes_before_any_download(ram: str, before: int) -> None:
    """A person pulled 20 GiB, and was then told that llama-server is missing; the notes had said so last."""
    machine = describe("rtx-5060", ram=ram, **ISSUE)
    steps = report(led(machine), machine, pull=True).steps[before:]
    assert "a llama-server in a build for CUDA (docs/gguf.md says how)" in steps[0].remark
    assert steps[1].commands[0] == f"snugvl pull {Q4}"
    amd = describe("rx-7900-xtx", ram="64GiB")
    remarks = [step.remark for step in report(led(amd), amd, pull=True).steps]
    assert sum("a llama-server in a build for Vulkan" in each for each in remarks) == 1


def test_the_headline_has_the_range_where_the_kind_of_memory_is_assumed() -> None:
    unsaid, said = (describe("rtx-5060", ram="64GiB", ddr=ddr, **ISSUE) for ddr in (None, "DDR5-5600"))
    plan = led(unsaid)
    assert (ddr := require(plan).speed.ddr) is not None
    first, exact = text(plan, unsaid).splitlines()[0], text(led(said), said).splitlines()[0]
    rate = require(plan).speed.decode_tokens_per_s or 0.0
    assert first.endswith(
        f", at about {rate:,.0f} tokens/s ({ddr[1]:,.0f} to {ddr[2]:,.0f}, by the kind of host memory)"
    )
    assert exact.endswith("tokens/s")


def test_what_runs_whole_beside_it_is_told_by_its_own_words() -> None:
    machine = describe("gtx-1060", ram="32GiB")
    plan = led(machine)
    assert plan.beside is not None
    name, said = plan.beside.option.model.name, text(plan, machine)
    assert f"Also by llama.cpp {name} runs whole on the GPU, at about " in said
    assert f"{name} about " in said, "a prediction, and its name says the format"
    assert "the first ranks higher by its vendor's tables (docs/plan.md)" in said, "no figure of it is known"
    assert "Qwen3-VL-30B" not in said, "nobody asks why a lesser model isn't there instead"


def test_a_mixture_is_not_sent_to_a_calibration_that_refuses_it() -> None:
    machine = describe("rtx-4090", ram="64GiB")
    mixture, dense = named("Qwen/Qwen3.6-35B-A3B", machine), named("Qwen/Qwen3.5-9B", describe("rtx-5060"))
    assert require(mixture).option.weights == "int4"
    assert "snugvl quantize" not in text(mixture, machine)
    assert "snugvl quantize" in text(dense, describe("rtx-5060"))


@pytest.mark.parametrize("ram", ["16GiB", None])
def test_a_named_mixture_runs_as_its_smaller_file_rather_than_not_at_all(ram: str | None) -> None:
    """It was refused with more memory as the way out, though the smaller edition ran in what there was."""
    machine = describe("rtx-5060", ram=ram)
    plan = named("Qwen/Qwen3.6-35B-A3B", machine)
    assert require(plan).option.model.name == Q3
    assert f"{Q3} is Qwen/Qwen3.6-35B-A3B with weights of three to six bits" in text(plan, machine)
    several = named("Qwen/Qwen3.6-35B-A3B", describe("rtx-5060", ram="32GiB"), concurrency=2)
    assert require(several).settings.concurrency == 2


def test_an_engine_that_cannot_hold_a_mixture_is_the_wish_to_leave_out() -> None:
    machine = describe("rtx-5060", ram="32GiB")
    plan = named("Qwen/Qwen3.6-35B-A3B", machine, backend="native")
    assert plan.choice is None
    found = report(plan, machine, pull=True)
    assert found.steps[-1].remark.startswith("Without --backend native it fits (20.54 GiB to download")
    assert found.commands == (f"snugvl pull {Q4}", f"snugvl serve {Q4} --backend llamacpp")


@pytest.mark.parametrize("backend", ["native", "vllm"])
def test_scales_of_experts_are_read_as_seldom_as_their_codes(backend: str) -> None:
    """The bound was below what the card can do: all experts' scales counted for every token."""
    machine, model = describe("h100"), "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4"
    choice = require(named(model, machine, backend=backend))
    facts, gpu = catalogue_facts(model), machine.gpus[0]
    assert facts is not None
    assert gpu.bandwidth is not None
    idle = 1 - 8 / 256
    read = sum(
        each.nbytes * (1 - idle * (".experts." in each.name))
        for each in facts.tensors
        if each.loaded and each.role not in ("vision", "connector", "embedding")
    )
    bytes_of_step = sum(nbytes for nbytes, _ in step_reads(choice.option.model, choice.settings))
    assert read <= bytes_of_step <= read / 0.88
    assert (choice.speed.most or 0) <= gpu.bandwidth / read


def test_an_old_cards_first_token_waits_for_experts_that_cross() -> None:
    choice = require(named(Q4, describe("gtx-1060", ram="32GiB")))
    assert choice.budget.gpu is not None
    assert choice.budget.gpu.bf16_flops is None
    assert (choice.speed.first_token_s or 0.0) > 1.0


@pytest.mark.parametrize(("images", "other"), [(1, "Qwen/Qwen3.5-2B"), (0, "Qwen/Qwen3.6-35B-A3B-FP8")])
def test_a_machine_without_a_gpu_is_led_to_a_mixture_as_one_with_a_gpu_is(images: int, other: str) -> None:
    """It was led to a 2B at 8 tokens/s, or to the same mixture on our engine at 5, where llama.cpp has 14."""
    machine = describe("none", ram="32GiB")
    plan = led(machine, images=images)
    choice, beside = require(plan), plan.beside
    assert (choice.option.model.name, choice.option.engine) == (Q4, "llamacpp")
    assert beside is not None
    assert beside.option.model.name == other
    assert (choice.speed.decode_tokens_per_s or 0) > (beside.speed.decode_tokens_per_s or 0)
    assert all(each.quality > choice.quality for each in plan.slower), "nor is it said to be too slow itself"
    said = text(plan, machine)
    assert f"{Q4} gives about 14 tokens/s from 20.54 GiB of files, {other} in " in said
    assert f"Without llama.cpp {other} runs on the processor, at about" in said


@pytest.mark.parametrize(
    ("ram", "model"),
    [("16GiB", "Qwen/Qwen3.5-2B"), ("24GiB", Q3), ("128GiB", Q4), (None, "Qwen/Qwen3.5-2B")],
)
def test_without_a_gpu_the_mixture_is_one_that_fits_and_answers_soon_enough(
    ram: str | None, model: str
) -> None:
    """In 128 GiB a 122B-A10B fits as well: its answer takes more than twice as long as the 2B's."""
    assert require(led(describe("none", ram=ram))).option.model.name == model


def test_a_named_mixture_without_a_gpu_is_planned_for_the_engine_that_is_much_quicker() -> None:
    machine = describe("none", ram="32GiB")
    plan = named("Qwen/Qwen3.6-35B-A3B", machine)
    assert (require(plan).option.model.name, plan.named) == (Q4, "Qwen/Qwen3.6-35B-A3B")
    assert plan.beside is not None
    assert plan.beside.option.engine == "native"
    assert "ranks higher" not in text(plan, machine), "it is the same model"
    asked = named("Qwen/Qwen3.6-35B-A3B", machine, backend="native")
    assert require(asked).option.engine == "native"


def test_one_core_has_no_range_by_kinds_of_host_memory() -> None:
    """Once "at about 21 tokens/s (21 to 21, by the kind of host memory)": a core is slower than any kind."""
    machine = replace(describe("rtx-3060", ram="32GiB"), cpu_cores=1)
    plan = led(machine)
    assert require(plan).settings.host_experts
    assert "by the kind of host memory" not in text(plan, machine)
