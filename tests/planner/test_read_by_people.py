"""What plans say, as a person read them who doesn't know the project: each test is of what was misread."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from snugvl.cli.app import app
from snugvl.cli.options import MachineChoice
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import GIB
from snugvl.errors import RequestError
from snugvl.hardware.describe import describe
from snugvl.hardware.machine import Machine
from snugvl.planner.plan import Plan
from snugvl.planner.recommend import catalogue_candidates, planned
from snugvl.planner.report.document import document
from snugvl.planner.report.plain import parts, plain
from snugvl.planner.report.sections import Report, report
from snugvl.planner.solve import Candidate
from snugvl.planner.wishes import Wishes
from tests.planner import random_plans


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    with random_plans.built():
        yield


def read(
    model: str | None, gpu: str | None, wishes: dict[str, Any] | None = None, **machine: Any
) -> tuple[Plan, Report, str]:
    """The plan, its report, and the short text."""
    on: Machine = describe(gpu, **machine)
    asked = Wishes(**(wishes or {}))
    facts = random_plans.facts(model) if model is not None else None
    candidates = [Candidate(facts)] if facts else catalogue_candidates(sees=asked.images > 0)
    plan = planned(candidates, on, asked)
    found = report(plan, on, pull=True)
    return plan, found, plain(found, verbose=False)


@pytest.mark.parametrize(
    ("model", "gpu", "machine"),
    [
        (None, "rx-7900-xtx", {"ram": "32GiB"}), (None, "m4", {"os": "macos", "ram": "16GiB"}),
        ("Qwen/Qwen3-VL-4B-Instruct", "rx-7900-xtx", {}), ("Qwen/Qwen3-VL-4B-Instruct", "v100", {}),
        ("Qwen/Qwen3-VL-4B-Instruct-FP8", "gtx-1080", {}), (None, "rtx-4090", {"os": "windows"}),
        ("google/gemma-3-4b-it", "arc-b580", {"os": "windows"}), ("Qwen/Qwen2.5-VL-7B-Instruct", "p40", {}),
    ],
)  # fmt: skip
def test_the_way_that_uses_the_card_leads(model: str | None, gpu: str, machine: dict[str, Any]) -> None:
    """Host memory once led on AMD's and Apple's, and a V100 got no plan and no GGUF's name."""
    plan, found, text = read(model, gpu, **machine)
    assert plan.choice is not None
    assert plan.choice.option.engine == "llamacpp"
    assert plan.choice.budget.gpu is not None
    name = plan.choice.option.model.name
    assert name.endswith("-GGUF:Q4_K_M")
    assert text.startswith(f"{name} fits ")
    assert found.commands[0] == f"snugvl pull {name}"
    assert found.commands[1] == f"snugvl serve {name} --backend llamacpp"
    assert "a llama-server in a build for" in text or gpu.startswith("m")
    assert (plan.beside is not None) == (
        plan.choice.budget.gpu.api != "cuda" and "windows" not in machine.values()
    )
    assert (
        plan.beside is None
        or f"Without llama.cpp {plan.beside.option.model.name} runs on the processor" in text
    )
    assert ("In WSL2 snugvl's other engines run" in text) == (gpu == "rtx-4090")


def test_a_model_without_a_known_gguf_says_what_to_look_for() -> None:
    plan, found, text = read("Qwen/Qwen3.5-4B", "v100")
    assert plan.choice is None
    assert text.startswith("Tesla V100-SXM2-16GB (16.00 GiB, Linux) runs GGUF files alone, by llama.cpp\n")
    assert "On the GPU a GGUF of Qwen/Qwen3.5-4B in Q4_K_M runs, by llama.cpp" in found.steps[0].remark
    plan, found, text = read("Qwen/Qwen3.5-4B", "rx-7900-xtx")
    assert plan.choice is not None
    assert plan.choice.budget.device.cpu
    assert "On the GPU a GGUF of Qwen/Qwen3.5-4B in Q4_K_M runs" in found.steps[0].remark
    assert found.commands[-1] == "snugvl serve Qwen/Qwen3.5-4B"


def test_who_asks_for_an_engine_or_a_format_that_a_gguf_has_not_gets_it() -> None:
    for wishes in ({"backend": "native"}, {"quality": "bf16"}, {"backend": "transformers"}):
        plan, *_ = read("Qwen/Qwen3-VL-4B-Instruct", "rx-7900-xtx", wishes, ram="64GiB")
        assert plan.choice is not None
        assert plan.choice.option.engine != "llamacpp"


def test_better_models_that_are_slower_are_named_with_their_speed() -> None:
    """Once nobody learnt that 4B and 9B fit 32 GiB of host memory."""
    plan, found, text = read(None, "none", {"backend": "native"}, ram="32GiB")
    assert plan.choice is not None
    assert len(plan.slower) == 2
    for line, slower in zip(found.why_not[:2], plan.slower, strict=True):
        assert slower.quality > plan.choice.quality
        assert line.startswith(f"{slower.option.model.name} in ")
        rate = r"about [\d.]+ tokens/s \([\d.]+ to [\d.]+, computed, by assumed rates of host memory\)"
        assert re.search(rf"also fits, .* but slower: {rate}, first token after at least \d+ s", line)
        assert line in text
        assert slower.speed.decode_tokens_per_s < plan.choice.speed.decode_tokens_per_s  # type: ignore[operator]


def test_documents_on_a_processor_are_no_pictures_of_256_tokens() -> None:
    """gemma-3-4b-it was recommended for them, and Qwen3.5-4B not named with 9.71 GiB spare."""
    plan, found, _ = read(None, "none", {"purpose": "documents", "backend": "native"}, ram="24GiB")
    assert plan.choice is not None
    assert (plan.choice.option.model.name, plan.choice.tokens) == ("Qwen/Qwen3.5-2B", 2048)
    assert any("Qwen/Qwen3.5-4B" in line and "slower" in line for line in found.why_not[:2])
    more, *_ = read("Qwen/Qwen3.5-2B", "none", {"purpose": "documents", "max_pixels": 1 << 23}, ram="24GiB")
    assert more.choice is not None
    assert more.choice.tokens > 8000, "who asks for larger ones gets them"


def test_what_is_led_to_does_not_hang_on_how_large_pictures_may_be() -> None:
    """A GPU's spare memory gave larger pictures, whose wait took a model's better formats away."""
    wishes = {"purpose": "documents", "images": 4}
    plan, *_ = read(None, "l4", wishes, os="other", held="4000MiB", count=2, ram="48GiB")
    assert plan.choice is not None
    named, *_ = read(
        plan.choice.option.model.name, "l4", wishes, os="other", held="4000MiB", count=2, ram="48GiB"
    )
    assert named.choice is not None
    assert named.choice.settings == plan.choice.settings


def test_what_runs_whole_stands_before_a_token_in_ten_seconds() -> None:
    plan, found, text = read("Qwen/Qwen3-VL-32B-Instruct", "rtx-3060", count=2, ram="64GiB")
    assert plan.choice is not None
    assert plan.choice.option.offload
    assert plan.instead is not None
    name = plan.instead.option.model.name
    assert f"only with layers in host memory, at about 0.1 tokens/s; {name} fits whole\n" in text
    assert found.steps[0].remark.startswith(f"{name} in ")
    assert "fits whole and runs at about" in found.steps[0].remark
    assert found.commands[:2] == (f"snugvl pull {name}", found.commands[1])
    assert found.steps[1].remark.startswith("Qwen/Qwen3-VL-32B-Instruct, as asked, at about 0.1 tokens/s")


def test_a_wish_that_keeps_all_engines_out_is_in_the_headline_and_its_cure_next() -> None:
    """Once "nothing can run this", and the cure at the end of a line."""
    plan, found, text = read("Qwen/Qwen2.5-VL-3B-Instruct", "rtx-3050", {"kv_cache": "fp8"})
    assert plan.choice is None
    assert text.startswith(
        "Qwen/Qwen2.5-VL-3B-Instruct doesn't run with --kv-cache fp8 on NVIDIA GeForce RTX 3050"
    )
    assert found.steps[0].remark.startswith("Without --kv-cache fp8 it fits")
    assert found.commands[-1] == "snugvl serve Qwen/Qwen2.5-VL-3B-Instruct"
    assert "GGUF" not in found.why_not[0]
    _, found, text = read("pocket", "rtx-3050", {"memory_bytes": 6 * GIB, "context": 1 << 20})
    assert "doesn't run with --context 1048576" in text
    assert "--memory 6GiB" in found.commands[-1]


def test_many_models_that_are_refused_alike_are_not_listed() -> None:
    """36 names once, three times, before "in WSL2 it does"."""
    _, found, text = read(None, "rtx-4090", {"backend": "native"}, os="windows")
    assert found.headline.startswith("nothing can run this") or "--backend native" in found.headline
    assert max(map(len, text.splitlines())) < 400
    assert "in WSL2 it does" in found.why_not[0]
    assert re.search(r"and \d+ more models with snugvl's own engine", found.why_not[0])


def test_commands_stand_alone_on_their_lines() -> None:
    """`# remark` and `;` behind a command are words of it in zsh and cmd."""
    _, found, text = read(None, "rtx-5060")
    shown = [line.strip() for line in text.splitlines() if line.strip().startswith("snugvl ")]
    assert shown[: len(found.commands)] == list(found.commands)
    for command in found.commands:
        assert shlex.join(shlex.split(command)) == command
        assert not set("#;") & set(command)
    assert re.search(r"[\d.]+ GiB to download; that much disk is needed:\n    snugvl pull", text)


def test_a_model_that_is_too_large_is_refused_for_its_size() -> None:
    _, found, _ = read("Qwen/Qwen3-VL-235B-A22B-Instruct", "h100")
    assert "too much (weights would take 116.4 GiB alone)" in found.why_not[0]  # our own engine, in int4
    _, found, _ = read(None, "h100", {"purpose": "batch"})
    assert not any("does not run the" in line for line in found.why_not)


def test_a_larger_model_of_lower_rank_is_said_to_fit() -> None:
    """On the PC of an 8B's owner the 4B is better, and the 8B was not mentioned."""
    plan, _, text = read(None, "rtx-5060", os="wsl2", held="951MiB", ram="16GiB")
    assert plan.choice is not None
    assert plan.choice.option.model.name == "Qwen/Qwen3.5-4B"
    lower = r"Also fits\n  Qwen/Qwen3-VL-8B-Instruct\S* in int4 .*; its published scores are lower\n"
    assert re.search(lower, text)
    assert "MiB back, of 951 MiB that they hold; a tenth stays free" in text, (
        "232 too much and 259 back differ"
    )


def test_a_limit_and_a_margin_are_two_things() -> None:
    plan, found, text = read("Qwen/Qwen3.5-4B", "rtx-5060", {"memory_bytes": 4 * GIB})
    rows = {row.kind: row.nbytes for row in found.rows if row.kind in (Kind.LIMIT, Kind.MARGIN)}
    free, *_ = read("Qwen/Qwen3.5-4B", "rtx-5060")
    assert rows[Kind.MARGIN] == free.budget.margin_bytes
    assert rows[Kind.MARGIN] + rows[Kind.LIMIT] == plan.budget.margin_bytes
    assert "x not used, by --memory" in text
    assert sum(row.nbytes for row in found.rows) == found.total_bytes


@pytest.mark.parametrize("gpu", ["rtx-5060", "none", "rx-7900-xtx", "h100"])
def test_each_letter_of_the_bar_stands_in_one_place(gpu: str) -> None:
    _, found, text = read(None, gpu)
    (bar,) = re.findall(r"\n  \[(.*)\] ", text)
    assert len(re.sub(r"(.)\1*", r"\1", bar)) == len(set(bar))
    assert {kind for kind, _ in parts(found)} == {row.kind for row in found.rows if row.nbytes}


def test_waits_are_given_as_they_are_known_and_equal_speeds_explained() -> None:
    texts = [read("Qwen/Qwen3.5-2B", "none", ram=ram)[2] for ram in ("16GiB", "64GiB")]
    for text, weights in zip(texts, ("bf16", "fp32"), strict=True):
        assert f"  weights  {weights} (on a processor bf16 and fp32 are equally quick" in text
        assert re.search(r"first token after at least \d+ s\n", text), "once 36.53 s"


def test_words_of_formats_and_shares_are_usual_ones() -> None:
    _, _, text = read("Qwen/Qwen3-VL-8B-Instruct", "rtx-5060", os="wsl2", held="800MiB")
    assert "  engine   snugvl's own (native)\n" in text
    assert (
        "  weights  int4 (embedding, lm_head and vision tower in int8), so that what is below fits\n" in text
    )
    assert re.search(r"; the whole cache has [\d,]+ tokens, which up to \d+ requests at once share\n", text)
    assert "Of that this system gives 8.00 GiB at most, and at times less" in text
    assert "It is assumed that" not in text
    assert (
        "It is assumed that the desktop and other programs hold 1.00 GiB"
        in read(None, "rtx-5060", os="wsl2")[2]
    )
    for odd in ("int8 head", "int8 tower", "o other", " with native", "wasn't described"):
        assert odd not in text


def test_what_is_assumed_of_host_memory_is_said_where_a_part_of_the_model_is_in_it() -> None:
    plan, _, text = read(None, "rtx-3090")
    assert plan.choice is not None
    assert plan.choice.settings.embedding == "cpu"
    assert "System memory wasn't described; 16.00 GiB is assumed, " in text
    assert "int6: answers hardly differ from those of the original weights." in text
    assert "while others run would take" in text  # not "while others run alone would take"
    plan, _, text = read("Qwen/Qwen3-VL-2B-Instruct", "rtx-3090")
    assert plan.choice is not None
    assert plan.choice.settings.embedding == "gpu"
    assert "System memory" not in text


def test_formats_of_a_cache_are_those_of_its_engine() -> None:
    plan, _, text = read("Qwen/Qwen3-VL-32B-Instruct-GGUF:Q4_K_M", "rx-7900-xtx")
    assert plan.choice is not None
    assert plan.choice.settings.kv_name == "q8_0"
    assert "the KV cache in f16, with the same images and context: " in text
    assert "; in q8_0 it fits\n" in text
    assert "FP8" not in text


def test_more_requests_at_once_than_fit_are_refused_with_how_many_do_and_what_holds_as_many() -> None:
    """transformers, which answers one request after the other, had been said to fit 64."""
    plan, _, text = read("Qwen/Qwen3.5-4B", "rtx-5060", {"concurrency": 64})
    assert plan.choice is None
    most = re.search(r"Way out: it fits with --concurrency (\d+); (\S+) fits, in ", text)
    assert most is not None, text
    fewer, _, _ = read("Qwen/Qwen3.5-4B", "rtx-5060", {"concurrency": int(most[1])})
    assert fewer.choice is not None
    assert fewer.choice.option.engine == "native"
    assert read("Qwen/Qwen3.5-4B", "rtx-5060", {"concurrency": int(most[1]) + 1})[0].choice is None
    _, _, endless = read("Qwen/Qwen3.5-4B", "rtx-5060", {"concurrency": 10**24})
    assert f"it fits with --concurrency {most[1]}" in endless
    other, _, _ = read(most[2], "rtx-5060", {"concurrency": 64})
    assert other.choice is not None
    assert other.choice.settings.concurrency == 64


def test_a_model_in_comfort_is_led_to_where_llama_cpp_plans_one_request_at_a_time() -> None:
    """An 8B with pictures of 256 tokens had been: llama.cpp never has comfort's four requests at once."""
    plan, _, _ = read(None, "rx-7600", vram="6.5GiB", ram="12GiB")
    assert plan.choice is not None
    assert plan.choice.option.engine == "llamacpp"
    assert plan.choice.option.model.name == "Qwen/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M"
    assert (plan.choice.tokens, plan.choice.settings.context) >= (2048, 8192)
    assert plan.choice.score.led


def test_several_requests_at_once_lead_to_no_engine_that_answers_one_at_a_time() -> None:
    plan, _, text = read("google/gemma-3-4b-it", "none", {"concurrency": 4}, ram="16GiB")
    assert plan.choice is None
    assert "Without --concurrency 4 it fits" in text
    assert "with transformers: --concurrency 4 is for snugvl's own engine, vLLM and llama.cpp alone" in text
    with pytest.raises(RequestError, match=r"--concurrency 8 is not for transformers .*say --backend native"):
        read("Qwen/Qwen3-VL-2B-Instruct", "rtx-3090", {"backend": "transformers", "concurrency": 8})


# Every option of `plan` that is no machine's and no output's, from the command itself.
def test_what_is_slow_still_fits_where_nothing_quicker_does() -> None:
    """Nothing in FP8 is quick with such a context on a processor: once nothing fitted, not even in 4 TiB."""
    for ram in (64, 4096):
        plan, found, _ = read(None, "none", {"context": 131072, "weights": "fp8"}, os="wsl2", ram=f"{ram}GiB")
        assert plan.choice is not None, found.headline
        assert plan.choice.settings.context == 131072
        assert plan.choice.settings.weights == "fp8"


def test_the_same_model_in_another_format_is_fetched_once() -> None:
    plan, found, _ = read("Qwen/Qwen3.5-4B", "rtx-4060", {"quality": "bf16", "memory_bytes": 4 * GIB})
    assert plan.choice is not None
    assert plan.choice.option.offload
    assert plan.instead is not None
    assert plan.instead.option.model.name == "Qwen/Qwen3.5-4B"
    assert found.headline.endswith("; in int4 it fits whole")
    assert [command.split()[1] for command in found.commands] == ["pull", "serve", "serve"]


OUTPUT = {"model", "json", "save", "verbose", "offline", "help"}
NUMBERS = {"images": "2", "concurrency": "2", "max_pixels": "262144", "min_image_tokens": "512"}
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
DESCRIBING = {each.name for each in fields(MachineChoice)}
GIVEN = [each for each in COMMANDS["plan"].params if each.name not in OUTPUT | DESCRIBING | {"invocation"}]
SERVED = {option for each in COMMANDS["serve"].params for option in each.opts}


def _values(option: Any) -> list[str]:
    if option.is_flag:
        return [""]
    choices = getattr(option.type, "choices", None)
    return (
        list(choices)
        if choices
        else [NUMBERS.get(option.name, "4096")]
        if option.type.name == "integer"
        else ["7GiB"]
    )


# All values for one card, the last of each option in the suite; for another maker's one of each option.
CASES = [
    pytest.param("rtx-4060", option.opts[0], value, marks=() if value == last else pytest.mark.extended)
    for option in GIVEN
    for last in _values(option)[-1:]
    for value in _values(option)
]
CASES += [pytest.param("rx-7900-xtx", option.opts[0], _values(option)[-1]) for option in GIVEN]


@pytest.mark.parametrize(("gpu", "option", "value"), CASES)
def test_every_option_of_a_plan_reaches_the_command_that_is_printed(
    gpu: str, option: str, value: str, tmp_path: Path
) -> None:
    case = random_plans.Case("Qwen/Qwen3-VL-4B-Instruct", (("--gpu", gpu),), ((option, value),))
    outcome = random_plans.planned(case)
    if outcome.choice is None or outcome.machine is None or outcome.plan is None:
        assert outcome.code in (2, 5)
        return
    assert list(random_plans.check_command(case, outcome, tmp_path)) == []
    words = shlex.split(document(outcome.plan, outcome.machine)["command"])
    default = next(each.default for each in GIVEN if each.opts[0] == option)
    if option in SERVED and value != str(default) and words[1] == "serve":
        assert option in words
        if value:
            assert words[words.index(option) + 1] == (
                value if option != "--backend" else outcome.choice.option.engine
            )


def test_the_options_that_are_tried_are_those_of_the_command() -> None:
    assert len(GIVEN) >= 14
    assert {"--kv-cache", "--memory", "--speculation", "--for"} <= {each.opts[0] for each in GIVEN}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct-GGUF:Q4_K_M"),
        ("Qwen/Qwen3-VL-8B-Instruct-FP8", "Qwen/Qwen3-VL-8B-Instruct-GGUF:Q4_K_M"),
        ("Qwen/Qwen3-8B", "a GGUF of Qwen/Qwen3-8B in Q4_K_M"),
    ],
)
def test_a_processor_is_told_of_what_answers_sooner_before_the_download(model: str, said: str) -> None:
    """Our engine decoded 0.4 tokens/s where llama.cpp gave 27, and only who knew that had the second."""
    plan, found, _ = read(model, "none", ram="32GiB")
    (note,) = [note for note in found.notes if "answers sooner" in note]
    assert plan.choice is not None
    assert plan.quicker is not None
    soon, late = (each.speed.decode_tokens_per_s for each in (plan.quicker, plan.choice))
    assert soon is not None
    assert late is not None
    assert soon > 1.5 * late
    assert f"{said}, in weights" in note
    assert f"about {soon:.2g} tokens/s instead of {late:.2g}" in note
    assert "pip install 'snugvl[llamacpp]'" in note
    if command := re.search(r"snugvl serve .*", note):
        outcome = random_plans.planned(random_plans.Case(said, (("--gpu", "none"), ("--ram", "32GiB")), ()))
        settings, name, _ = random_plans.followed_command(shlex.split(command[0]), outcome)
        assert (settings, name) == (plan.quicker.settings, said)


@pytest.mark.parametrize(
    ("model", "wishes"),
    [
        ("pocket", {}),
        ("Qwen/Qwen3-VL-2B-Instruct", {"backend": "native"}),
        ("Qwen/Qwen3-8B", {"quality": "bf16"}),
    ],
)
def test_nobody_is_told_of_another_engine_for_nothing(model: str, wishes: dict[str, Any]) -> None:
    """Where ours is quick enough, was asked for, or four bits were ruled out."""
    plan, found, _ = read(model, "none", wishes, ram="32GiB")
    assert plan.choice is not None
    assert plan.quicker is None
    assert not [note for note in found.notes if "answers sooner" in note]


def test_larger_prefill_steps_slow_no_decoding() -> None:
    """9 GiB a card once gave 51.3 tokens/s where 8 gave 53.7: a window was read with a step's blocks."""
    before, after = (
        read("google/gemma-3-4b-it", "rtx-3050", {"min_image_tokens": 256}, count=8, ram="256GiB", vram=vram)
        for vram in (None, "9GiB")
    )
    was, now = before[0].choice, after[0].choice
    assert was is not None
    assert now is not None
    assert now.settings.chunk > was.settings.chunk
    assert now.speed.decode_tokens_per_s == was.speed.decode_tokens_per_s
