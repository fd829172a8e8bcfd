"""What a plan states, as a person acts on it: the right value of each statement that was wrong once.

`random_plans.py` follows what is printed for thousands of random machines and wishes; some dozen
of them are followed here. The tests below it are single cases, each with what once was said.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snugvl.checkpoint.catalogue import catalogue_facts
from snugvl.checkpoint.facts import ModelFacts
from snugvl.core.sizes import GIB, MIB, exact_size, parse_size
from snugvl.errors import DoesNotFit, InputError, RequestError
from snugvl.hardware.describe import describe
from snugvl.hardware.gpus import known
from snugvl.hardware.machine import Machine
from snugvl.planner.budget import beside_bytes, budgets
from snugvl.planner.commands import next_command
from snugvl.planner.engines.vllm.footprint import experts_workspace
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.recommend import with_instead
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import headline, report
from snugvl.planner.settings import Settings
from snugvl.planner.shortfall import way_out
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.planner import random_plans

CASES = 16
MIXTURE = "Qwen/Qwen3-VL-30B-A3B-Instruct"


def facts(name: str) -> ModelFacts:
    found = catalogue_facts(name)
    assert found is not None
    return found


def planned(name: str, gpu: str | None, wishes: dict[str, Any] | None = None, **machine: Any) -> Plan:
    on = describe(gpu, **machine)
    return with_instead(solve([Candidate(facts(name))], on, Wishes(**(wishes or {}))), on)


def chosen(name: str, gpu: str | None, wishes: dict[str, Any] | None = None, **machine: Any) -> Choice:
    return require(planned(name, gpu, wishes, **machine))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return random_plans.ggufs(tmp_path_factory.mktemp("ggufs"))


def test_what_is_printed_is_followed(files: tuple[str, ...], tmp_path: Path) -> None:
    counts, found = random_plans.run(CASES, 11, files, tmp_path)
    assert not found, "\n".join(line for lines in found.values() for line in lines)
    assert counts["cases"] == CASES


def test_a_mixture_by_bitsandbytes_is_no_way_out() -> None:
    """Once int4 by transformers on an RTX 3090, 17.85 GiB; its experts alone are 54 GiB in bf16."""
    for gpu in ("rtx-3090", "rtx-5090", "l40s"):
        option = chosen(MIXTURE, gpu).option
        assert (option.engine, option.weights) == ("native", "int4" if gpu == "rtx-3090" else "int8")
        assert planned(MIXTURE, gpu, {"backend": "transformers"}).choice is None
    refused = planned(MIXTURE, "rtx-3090", {"weights": "int4", "backend": "transformers"})
    assert any("leaves a mixture's experts in bf16" in refusal.text for refusal in refused.refusals)


def test_one_more_gpu_takes_no_speed_for_a_pool_that_one_has_already() -> None:
    """Random plans found it: beside small pictures a pool of one GPU didn't count, of several it did."""
    wishes = {"context": 1024, "images": 2, "quality": "bf16"}
    one, two = (chosen(MIXTURE, "a100", wishes, count=count) for count in (1, 2))
    assert one.settings == two.settings


def test_a_mixture_has_a_speed_of_the_experts_that_a_token_reads() -> None:
    model = inventory(facts(MIXTURE))
    assert model.experts_read == 8 / 128
    choice = chosen(MIXTURE, "h100")
    rate = choice.speed.decode_tokens_per_s
    # 3.3 G values of a token in bf16, and half of 32,768 tokens of cache; 48 layers of vLLM's beside.
    assert rate is not None
    assert choice.speed.most is not None
    assert 1 / (3.3e9 * 2 / 3350e9 * 1.7 + 48 * 130e-6) < rate < choice.speed.most < 3350e9 / (3.3e9 * 2)
    narrow = Settings("vllm", chunk=512)
    assert experts_workspace(model, narrow) == 512 * 8 * (2048 + 2048) * 2


def test_several_gpus_give_finer_weights_and_say_which_stay_idle() -> None:
    """Once int4 on one of four RTX 4090."""
    for concurrency in (1, 4):
        choice = chosen("Qwen/Qwen3-VL-32B-Instruct", "rtx-4090", {"concurrency": concurrency}, count=4)
        assert (choice.option.engine, choice.settings.weights, choice.settings.gpus) == ("vllm", "bf16", 4)
    on = describe("rtx-4090", count=4)
    small = solve([Candidate(facts("Qwen/Qwen3-VL-2B-Instruct"))], on, Wishes())
    assert "RTX 4090, one of 4 (23.99 GiB, Linux)" in headline(small, on)
    large = solve([Candidate(facts("Qwen/Qwen3-VL-32B-Instruct"))], on, Wishes())
    assert "RTX 4090 × 4 (23.99 GiB each, Linux)" in headline(large, on)


def test_a_prequantized_edition_is_tried_before_a_smaller_model_is_named() -> None:
    plan = planned("Qwen/Qwen3.5-27B", "rtx-3060", count=2)
    said = "a pre-quantized 4-bit edition of Qwen/Qwen3.5-27B (AWQ, GPTQ) fits, in int4, with vLLM on 2 GPUs"
    assert way_out(plan) == said
    alone = planned("Qwen/Qwen3.5-27B", "rtx-3060")
    assert way_out(alone) == "use a smaller model, or a GPU with more memory"


def test_more_ram_is_never_slower() -> None:
    """Once 15.7 tokens/s in bf16 with 16 GiB, and 7.8 in float32 with 17."""
    rates = [
        chosen("Qwen/Qwen3.5-2B", "none", ram=f"{ram}GiB").speed.decode_tokens_per_s for ram in range(12, 40)
    ]
    assert all(rate is not None for rate in rates)
    assert max(rates) / min(rates) < 1.05  # type: ignore[type-var, operator]


def test_what_the_driver_holds_is_nobodys_to_give_back() -> None:
    """Once "when others give 248 MiB of their 468 MiB back", all of them the driver's."""
    for gib in range(3, 24):
        plan = planned("Qwen/Qwen3-VL-8B-Instruct-FP8", None, vram=f"{gib}GiB", held=0)
        assert not [each.remedy for each in plan.rejections if each.remedy and "give" in each.remedy]
    lent = planned("Qwen/Qwen3-VL-4B-Instruct-FP8", "rtx-5060", os="wsl2", held="4900MiB")
    assert "of 4.79 GiB that they hold" in way_out(lent)
    bound = planned(
        "Qwen/Qwen3-VL-4B-Instruct-FP8", "rtx-5060", {"memory_bytes": 2 * GIB}, os="wsl2", held="1000MiB"
    )
    assert way_out(bound).startswith("it fits with --memory ")


def test_the_refusal_that_is_told_is_the_true_one() -> None:
    plan = planned("Qwen/Qwen3-VL-2B-Instruct-FP8", "rtx-4090", {"weights": "bf16", "quality": "bf16"})
    reasons = {refusal.engine: refusal.text for refusal in plan.refusals}
    assert reasons["native"] == reasons["transformers"] == "its weights are fp8, coarser than --quality bf16"
    with pytest.raises(DoesNotFit, match="coarser than --quality bf16"):
        require(plan)


@pytest.mark.parametrize(
    "wishes",
    [
        {"weights": "int4", "quality": "bf16"}, {"tower": "streamed", "backend": "vllm"},
        {"embedding": "cpu", "backend": "transformers"}, {"speculation": "ngram", "backend": "llamacpp"},
        {"speculation": "mtp", "backend": "vllm"}, {"kv_cache": "fp8", "backend": "transformers"},
    ],
)  # fmt: skip
def test_contradictory_wishes_name_both_options(wishes: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        Wishes(**wishes)
    flags = {"weights": "--weights", "quality": "--quality", "tower": "--tower", "embedding": "--embedding",
             "speculation": "--speculation", "kv_cache": "--kv-cache", "backend": "--backend"}  # fmt: skip
    assert all(f"{flags[name]} {value}" in str(refused.value) for name, value in wishes.items())


@pytest.mark.parametrize(
    ("gpu", "machine", "told"),
    [
        ("rtx-4090", {"os": "windows"}, "it does not run on Windows; in WSL2 it does"),
        ("v100", {}, "compute capability 7.0 is older than 7.5"),
        ("gtx-1080", {}, "compute capability 6.1 is older than 7.5"),
        ("none", {"os": "windows"}, "it does not run on Windows; in WSL2 it does"),
    ],
)
def test_no_engine_is_planned_where_it_does_not_run(gpu: str, machine: dict[str, Any], told: str) -> None:
    plan = planned("Qwen/Qwen3-VL-2B-Instruct", gpu, **machine)
    assert plan.choice is None
    reasons = {refusal.engine: refusal.text for refusal in plan.refusals}
    assert {reasons[engine] for engine in ("native", "transformers", "vllm")} <= {told, reasons["vllm"]}
    assert reasons["native"] == told


@pytest.mark.parametrize(
    ("gpu", "machine", "api", "gib"),
    [
        ("rx-7900-xtx", {}, "vulkan", 24), ("arc-b580", {"os": "windows"}, "vulkan", 12),
        ("m4", {"ram": "36GiB"}, "metal", 24), ("m4-max", {"ram": "128GiB"}, "metal", 96),
        ("mi300x", {}, "vulkan", 192), ("Radeon RX 7600", {}, "vulkan", 8),
    ],
)  # fmt: skip
def test_other_makers_gpus_are_llama_cpps(
    gpu: str, machine: dict[str, Any], api: str, gib: int, files: tuple[str, ...]
) -> None:
    system = "macos" if api == "metal" else machine.pop("os", "linux")
    on = describe(gpu, os=system, **machine)
    assert not on.gpus
    assert (on.others[0].api, on.others[0].total_bytes) == (api, gib * GIB)
    gguf = random_plans.facts(files[0])
    choice = require(solve([Candidate(gguf)], on, Wishes()))
    assert (choice.option.engine, choice.budget.gpu) == ("llamacpp", on.others[0])
    assert choice.speed.decode_tokens_per_s
    text = plain(report(solve([Candidate(gguf)], on, Wishes()), on))
    assert "CUDA" not in text
    assert "is for GGUF files alone, by llama.cpp" in text
    other = solve([Candidate(facts("Qwen/Qwen3-VL-2B-Instruct"))], on, Wishes()).choice
    assert (other is None) == (system == "windows")
    assert other is None or other.budget.gpu is None


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("rtx-5060", {"os": "macos"}), (None, {"vram": "36GiB", "os": "macos"}), ("m4", {"os": "wsl2"}),
        ("rx-7900-xtx", {"os": "macos"}), ("none", {"count": 2}), ("m4", {"os": "macos", "count": 2}),
        ("m4", {"os": "macos", "vram": "36GiB"}),
    ],
)  # fmt: skip
def test_a_machine_that_can_not_be_is_refused(gpu: str | None, machine: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        describe(gpu, **machine)


def test_every_row_of_the_table_can_be_described() -> None:
    """A row of compute capability 6 once broke every look-up."""
    for model in known():
        on = describe(
            model.name,
            os="macos" if model.api == "metal" else "linux",
            vram=None if model.unified else model.total_bytes,
        )
        assert (on.gpus or on.others)[0].name == model.product


def test_parent_and_child_count_host_memory_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once 13,721 and 14,745 MiB of one machine."""
    torch = pytest.importorskip("torch")
    from snugvl.backends import place

    on = describe("rtx-5060", ram="16GiB")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    child = place.place_on(torch.device("cuda", 0), machine=on)
    assert child.host_bytes == budgets(on)[0].device.host_bytes == beside_bytes(on)
    on = describe("gb10")  # whose memory is the host's
    child = place.place_on(torch.device("cuda", 0), machine=on)
    assert child.host_bytes == budgets(on)[0].device.host_bytes == 0
    assert child.planned().unified
    assert child.usable_bytes == budgets(on)[0].usable_bytes


class _Properties:
    major, minor, name, multi_processor_count = 12, 0, "RTX 5060", 30


def test_a_described_machine_has_a_system(tmp_path: Path) -> None:
    """4 GiB once "fit" 3.32."""
    on = describe("none", ram="4GiB")
    assert budgets(on)[0].usable_bytes < 2.6 * GIB


@pytest.mark.parametrize("nbytes", [1, 20 * GIB, 7200 * MIB, 777_777_777, 3 * 1024, GIB + 1])
def test_a_limit_is_printed_as_it_is_read(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes


def test_texts_say_nothing_that_helps_nobody() -> None:
    on: Machine = describe(None, vram="8GiB")
    plan = solve([Candidate(facts("pocket"))], on, Wishes())
    text = plain(report(plan, on))
    assert text.startswith("pocket fits NVIDIA GPU (8.00 GiB, Linux), with")
    card = describe("rtx-3090")
    text = plain(report(solve([Candidate(facts("pocket"))], card, Wishes()), card))
    rate = require(solve([Candidate(facts("pocket"))], card, Wishes())).speed.decode_tokens_per_s
    assert 1000 < (rate or 0) <= 10_000, "the host's part of a step, where there is little to read"
    assert "first token" not in text
    large = solve([Candidate(facts("Qwen/Qwen3-VL-32B-Instruct"))], on, Wishes())
    assert "would be needed; " in plain(report(large, on))
    text_alone = solve(
        [Candidate(facts("Qwen/Qwen3-VL-4B-Instruct-FP8"))], describe("rtx-3050"), Wishes(images=0)
    )
    assert "same images" not in plain(report(text_alone, on))
    from snugvl.planner.recommend import catalogue_candidates

    card = describe("rtx-3060")
    lines = report(solve(catalogue_candidates(), card, Wishes()), card).why_not
    assert len(lines) == len({line.partition(" as ")[2] or line for line in lines}), "one line for three 27Bs"
    assert not [line for line in lines if "GGUF" in line]


def test_more_memory_of_several_gpus_never_gives_fewer_bits_and_less_speed() -> None:
    """Once bf16 at 401 tokens/s on eight cards of 6 GiB, and int8 at 103 on one of 10."""
    wishes = {"quality": "int6", "concurrency": 16}
    for vram in ("6GiB", "8GiB", "10GiB", "12GiB"):
        choice = chosen("Qwen/Qwen2.5-VL-3B-Instruct", "rtx-2060", wishes, vram=vram, held=0, count=8)
        assert choice.settings.weights == "bf16", vram


def test_more_ram_never_takes_a_plan_away_under_a_limit() -> None:
    """Room for float32 is what may be taken, not what is free."""
    wishes = {"memory_bytes": 3_543_348_019, "images": 0, "language_only": True}
    for ram in ("8GiB", "16GiB", "48GiB", "256GiB"):
        assert planned("Qwen/Qwen2.5-VL-3B-Instruct", "none", wishes, ram=ram).choice is not None, ram


def test_copies_on_several_gpus_count_with_all_their_requests() -> None:
    """Once 32,768 tokens on four GPUs and 12,288 on five, of which each copy has 13 of 64 requests."""
    wishes, at_least = {"concurrency": 64}, (0, 0)
    for count in (4, 5, 8):
        choice = chosen("Qwen/Qwen3-VL-8B-Instruct-FP8", "rtx-6000-ada", wishes, vram="80GiB", count=count)
        reached = choice.settings.context, choice.tokens
        assert min(a - b for a, b in zip(reached, at_least, strict=True)) >= 0, (count, reached, at_least)
        at_least = reached
    assert choice.settings.data_parallel == 8
    two = chosen("microsoft/Phi-4-mini-instruct", "a100", wishes, held=4000 * MIB, count=2)
    assert (two.settings.data_parallel, two.settings.context) == (2, 16384), "4,096 once, 8,192 on one"


def test_requests_in_flight_of_vllm_are_what_its_gpus_have_room_for() -> None:
    """Once bf16 at 185 tokens/s on eight cards of 6 GiB, and int4 at 79 on one of 10, for its larger pool."""
    for vram in ("6GiB", "8GiB", "10GiB", "12GiB"):
        wishes = {"images": 0, "purpose": "batch"}
        choice = chosen("mistralai/Mistral-7B-Instruct-v0.3", "rtx-2060", wishes, vram=vram, held=0, count=8)
        assert choice.settings.weights == "bf16", vram


def test_float32_on_a_processor_is_a_choice_of_transformers_too() -> None:
    """Once nothing else as soon as half of the memory had room for the weights, whatever a context took."""
    wishes = {"context": 32768, "purpose": "documents"}
    kinds = []
    for ram in ("16GiB", "17GiB", "18GiB", "20GiB", "24GiB"):
        plan = planned("OpenGVLab/InternVL3-2B-hf", "none", wishes, ram=ram)
        assert plan.choice is not None, ram
        kinds.append(plan.choice.settings.weights)
    assert kinds == sorted(kinds)
    assert kinds[-1] == "fp32"
    low = {"context": 98304, "weights": "int8", "backend": "native"}
    for ram in ("18.5GiB", "19GiB", "20GiB", "24GiB"):
        assert planned("Qwen/Qwen3-VL-2B-Instruct", "none", low, ram=ram).choice is not None, ram


@pytest.mark.parametrize(
    ("model", "gpu", "machine", "wishes"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "rtx-4060", {}, {}),
        ("Qwen/Qwen3-8B", "l40s", {"count": 3}, {"images": 0, "context": 4096, "memory_bytes": 7200 * MIB}),
    ],
)
@pytest.mark.parametrize(("ram", "promised"), [("2GiB", False), ("24GiB", True)])
def test_an_embedding_in_host_memory_is_promised_where_it_fits(
    model: str, gpu: str, machine: dict[str, Any], wishes: dict[str, Any], ram: str, promised: bool
) -> None:
    """Once for 2 GiB of RAM too, of which the process alone leaves nothing."""
    machine = {**machine, "os": "wsl2", "held": 300 * MIB, "ram": ram}
    on = describe(gpu, **machine)
    notes = report(planned(model, gpu, wishes, **machine), on).notes
    assert any(note.startswith("--embedding cpu would free") for note in notes) == promised
    then = planned(model, gpu, {**wishes, "embedding": "cpu"}, **machine)
    assert (then.choice is not None) == promised


def planned_words(words: str) -> Plan:
    """The plan of a command line of `snugvl plan`."""
    given = words.split()
    named = not given[0].startswith("--")
    pairs = tuple(zip(given[named::2], given[named + 1 :: 2], strict=True))
    with random_plans.built():
        found = random_plans.planned(random_plans.Case(given[0] if named else None, pairs, ())).plan
    assert found is not None
    return found


def test_a_model_that_is_led_to_is_planned_the_same_by_its_name() -> None:
    """Nobody is led to bitsandbytes, and who names a model may have it: the command names the format."""
    words = "--gpu rtx-2080-ti --gpus 4 --ram 17GiB --task ask --backend transformers"
    led = planned_words(words)
    assert led.choice is not None
    command = next_command(led.choice, led.wishes)
    named = planned_words(f"{led.choice.option.model.name} {words}")
    assert named.choice is not None
    assert named.choice.settings.weights == "int4"
    assert led.choice.settings.weights == "bf16"
    assert "--weights bf16" in command


def test_smaller_pictures_that_were_asked_for_are_no_reason_for_a_smaller_model() -> None:
    """With --max-pixels no model has comfortable pictures but those whose pictures have a fixed size: 256 M
    instead of 2 B."""
    led = planned_words("--gpu rtx-2060 --held 4000MiB --max-pixels 1048576 --concurrency 4 --vram 7GiB")
    assert led.choice is not None
    assert led.choice.option.model.name == "Qwen/Qwen3.5-2B"


def test_one_more_gpu_is_not_taken_for_what_fits_without() -> None:
    """Where context and pictures were asked for, only requests at once grow; they take no third GPU, which
    would share groups of layers at half the speed."""
    words = "Qwen/Qwen3.5-4B --gpu rtx-4060 --gpus {} --context 32768 --max-pixels 4194304 --for batch"
    for gpus in (2, 3):
        found = planned_words(words.format(gpus) + " --concurrency 2").choice
        assert found is not None
        assert found.settings.tensor_parallel == 2


def test_a_way_out_on_a_processor_promises_no_figure_where_a_gpu_may_take_it() -> None:
    words = "Qwen/Qwen2.5-VL-3B-Instruct --gpu arc-b580 --held 8GiB --max-pixels {}"
    here = describe("arc-b580", held=8 << 30)
    notes = "\n".join(report(planned_words(words.format(4194304)), here).notes)
    assert "may fit the GPU; see what becomes of it with --max-pixels 262144" in notes
    after = planned_words(words.format(262144)).choice
    assert after is not None
    assert after.option.engine == "llamacpp"


def test_a_smaller_model_is_no_loss_where_everything_else_is_better() -> None:
    """Of the check itself: with 64 at once a V100 of 16 GiB has an 8B with 1,536 tokens each, one of 34 GiB a
    3B with 12,288. A smaller model with no more of both is a loss still."""
    small = chosen("Qwen/Qwen3-VL-8B-Instruct-FP8", "rtx-4090", {"concurrency": 64})
    large = chosen("Qwen/Qwen2.5-VL-3B-Instruct", "rtx-4090", {"concurrency": 64}, vram="48GiB")
    assert random_plans.rank(large) < random_plans.rank(small)
    assert random_plans._better_in_all(small, large)
    for worse in (
        replace(large, tokens=small.tokens - 1),
        replace(large, settings=large.settings._replace(context=small.settings.context)),
        replace(large, speed=replace(large.speed, decode_tokens_per_s=1.0)),
    ):
        assert not random_plans._better_in_all(small, worse)


def test_thumbnails_of_a_fixed_size_are_no_reason_for_a_lower_model() -> None:
    """One more GiB gave gemma-3-4b, whose pictures all have 256 tokens, instead of Qwen3-VL-4B."""
    words = "--gpu rx-7600 --os windows --held 951MiB --ram 128GiB --task ask --concurrency 16"
    for more in ("", " --vram 9GiB"):
        led = planned_words(words + more).choice
        assert led is not None
        assert led.option.model.name.startswith("Qwen/Qwen3-VL-4B-Instruct-GGUF")


def test_a_gpu_that_stays_free_has_its_reason() -> None:
    on: Machine = describe("rtx-4090", count=2)
    notes = report(planned("Qwen/Qwen3-VL-2B-Instruct", "rtx-4090", count=2), on).notes
    assert any(note.startswith("The other GPU stays free: snugvl's own engine runs on one") for note in notes)
    four = describe("rtx-4090", count=4)
    notes = report(planned("Qwen/Qwen3-VL-2B-Instruct", "rtx-4090", count=4), four).notes
    assert any(note.startswith("3 GPUs stay free: ") for note in notes)
    alone = report(planned("Qwen/Qwen3-VL-2B-Instruct", "rtx-4090"), describe("rtx-4090")).notes
    assert not any("free: " in note for note in alone)


def test_an_engine_that_has_to_be_installed_says_how_and_what_runs_without() -> None:
    plan = planned("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "rtx-4060")
    assert plan.choice is not None
    assert plan.choice.option.engine == "vllm"
    text = plain(report(plan, describe("rtx-4060")))
    assert "vLLM is installed with pip install 'snugvl[vllm]'" in text
    assert "Without it: --backend transformers, installed with pip install 'snugvl[transformers]'." in text
    asked = planned("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "rtx-4060", {"backend": "vllm"})
    assert "Without it" not in plain(report(asked, describe("rtx-4060")))


def test_the_reason_of_most_engines_comes_first() -> None:
    with pytest.raises(DoesNotFit) as caught:
        require(planned("pocket", "none", {"context": 1_000_000}))
    text = str(caught.value)
    assert text.startswith(
        "nothing can run what was asked for: pocket with native and transformers: its context ends at 4,096"
    )
    assert text.count("4,096") == 1
