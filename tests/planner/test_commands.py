"""The commands: every flag computed, and safe to paste."""

import json
import shlex
from dataclasses import replace

import pytest

from snugvl.planner.commands import next_command, plain_command
from snugvl.planner.engines.vllm.footprint import NCCL_BYTES, NCCL_TORCH, NCCL_TORCH_BYTES
from snugvl.planner.plan import Choice
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.planner.machines import GIB, MIB, machine, rtx_5060
from tests.planner.models import qwen3_vl, text_only


def plain(choice: Choice) -> str:
    """vLLM's own command."""
    command = plain_command(choice)
    assert command is not None
    return command


def chosen(size: str, wishes: Wishes, fp8: bool = True, **on: object) -> Choice:
    place = machine(**on) if on else rtx_5060()  # type: ignore[arg-type]
    return require(solve([Candidate(qwen3_vl(size, fp8=fp8))], place, wishes))


def flags(command: str) -> dict[str, str]:
    """Flags with a value, as a shell would hand them over."""
    words = shlex.split(command)
    return {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}


def test_vllm_gets_every_flag() -> None:
    wishes = Wishes(backend="vllm", images=2, concurrency=3, context=4096)
    choice = chosen("2B", wishes)
    command = plain(choice)
    assert command.startswith("vllm serve Qwen/Qwen3-VL-2B-Instruct-FP8 ")
    found = flags(command)
    assert found["--max-model-len"] == "4096"
    # Three are sure of their room; more may run where they need less, and are pre-empted otherwise.
    assert int(found["--max-num-seqs"]) == choice.settings.sequences >= 3
    assert found["--max-num-batched-tokens"] == str(choice.settings.chunk)
    assert json.loads(found["--limit-mm-per-prompt"]) == {"image": 2, "video": 0}
    assert json.loads(found["--mm-processor-kwargs"]) == {"max_pixels": choice.settings.max_pixels}
    assert ("--enforce-eager" in command) == choice.settings.eager
    assert "tensor-parallel" not in command


def test_utilisation_is_of_the_total_and_fits_what_is_free() -> None:
    choice = chosen("4B", Wishes(backend="vllm"))
    budget = choice.budget
    asked = float(flags(plain(choice))["--gpu-memory-utilization"]) * budget.total_bytes
    assert asked + budget.device.context_bytes <= budget.usable_bytes
    # … and it is enough for what was planned.
    assert asked + budget.device.context_bytes >= choice.footprint.total_bytes - budget.total_bytes / 10_000


def test_fp8_cache_and_several_gpus() -> None:
    wishes = Wishes(backend="vllm")
    choice = chosen("2B", wishes)
    small = replace(choice, settings=choice.settings._replace(kv="fp8", eager=False))
    assert "--kv-cache-dtype fp8" in plain(small)
    assert "--enforce-eager" not in plain(small)
    pair = chosen("8B", wishes, fp8=False, total_bytes=12 * GIB, gpus=2)
    command = plain(pair)
    assert command.startswith("CUDA_VISIBLE_DEVICES=0,1 vllm serve")
    assert "--tensor-parallel-size 2" in command
    asked = float(flags(command)["--gpu-memory-utilization"]) * pair.budget.total_bytes
    before = pair.budget.device.context_bytes + NCCL_BYTES  # taken when vLLM looks at what is free
    # Taken later, of the share: room for weights and KV cache is without it.
    assert pair.footprint.named(NCCL_TORCH) == NCCL_TORCH_BYTES
    assert choice.footprint.named(NCCL_TORCH) == 0
    assert 0 <= pair.budget.usable_bytes - before - asked < pair.budget.total_bytes / 1000


def test_text_alone_leaves_the_tower_out() -> None:
    wishes = Wishes(images=0, backend="vllm")
    choice = chosen("2B", wishes)
    assert "weights: vision tower" not in {part.name for part in choice.footprint.components}
    assert json.loads(flags(plain(choice))["--limit-mm-per-prompt"]) == {
        "image": 0,
        "video": 0,
    }
    model = text_only(qwen3_vl("2B"))
    alone = require(solve([Candidate(model)], machine(24 * GIB), wishes))
    assert "--limit-mm-per-prompt" not in plain(alone)


def test_our_own_command_is_one_that_we_have() -> None:
    wishes = Wishes(backend="native", task="detect")
    choice = chosen("2B", wishes, fp8=False, total_bytes=16 * GIB)
    words = shlex.split(next_command(choice, wishes))
    assert words[:4] == ["snugvl", "detect", "--model", "Qwen/Qwen3-VL-2B-Instruct"]
    assert "--backend" in words
    several = Wishes(backend="native", images=2, task="ask")
    choice = chosen("2B", several, fp8=False, total_bytes=16 * GIB)
    words = shlex.split(next_command(choice, several))
    assert words[:2] == ["snugvl", "serve"], "snugvl ask plans for one image"
    assert words[words.index("--images") + 1] == "2"


@pytest.mark.parametrize("images", [1, 2])
def test_without_a_task_it_is_served(images: int) -> None:
    """What was wished and nothing else: the same solver plans again."""
    wishes = Wishes(images=images, context=6000, max_pixels=1 << 20, purpose="documents", kv_cache="fp8")
    choice = chosen("2B", wishes, fp8=False, total_bytes=16 * GIB)
    words = shlex.split(next_command(choice, wishes))
    assert words[:3] == ["snugvl", "serve", "Qwen/Qwen3-VL-2B-Instruct"]
    assert words[3:11] == [
        "--context", "6000", "--max-pixels", str(1 << 20), "--kv-cache", "fp8", "--for", "documents",
    ]  # fmt: skip
    assert words[11:] == ([] if images == 1 else ["--images", "2"])
    assert not {"--model", "--together"} & set(words)


def test_every_engine_is_served_by_our_own_command() -> None:
    wishes = Wishes(backend="transformers")
    choice = chosen("2B", wishes, total_bytes=16 * GIB)
    words = shlex.split(next_command(choice, wishes))
    assert words[:5] == ["snugvl", "serve", "Qwen/Qwen3-VL-2B-Instruct-FP8", "--backend", "transformers"]
    assert plain_command(choice) is None
    one = shlex.split(next_command(choice, Wishes(backend="transformers", task="ask")))
    assert one[:2] == ["snugvl", "ask"]
    assert one[one.index("--backend") + 1] == "transformers"
    many = Wishes(backend="vllm", images=2, concurrency=3, context=4096, task="ask")
    words = shlex.split(next_command(chosen("2B", many), many))
    assert words[:5] == ["snugvl", "serve", "Qwen/Qwen3-VL-2B-Instruct-FP8", "--backend", "vllm"]
    assert words[words.index("--images") + 1] == "2"
    assert words[words.index("--concurrency") + 1] == "3"
    blind = Wishes(images=0, language_only=True)
    assert "--language-only" in next_command(chosen("2B", blind), blind)


def test_a_folder_with_spaces_is_quoted() -> None:
    facts = replace(qwen3_vl("2B"), name="/models/my model; rm -rf x")
    choice = require(solve([Candidate(facts)], machine(16 * GIB), Wishes()))
    words = shlex.split(next_command(choice, Wishes()))
    assert "/models/my model; rm -rf x" in words


def test_the_gpu_with_most_room_is_used() -> None:
    on = machine(16 * GIB, gpus=2)
    busy = replace(on.gpus[0], free_bytes=512 * MIB)
    choice = require(solve([Candidate(qwen3_vl("2B"))], replace(on, gpus=(busy, on.gpus[1])), Wishes()))
    assert [gpu.index for gpu in choice.gpus] == [1]
    assert "--device cuda:1" in next_command(choice, Wishes(backend="native"))
    named = replace(choice, gpus=(replace(on.gpus[1], uuid="GPU-abc"),))
    served = replace(named, option=replace(choice.option, engine="vllm"))
    assert plain(served).startswith("CUDA_VISIBLE_DEVICES=GPU-abc vllm serve")
    third = replace(served, gpus=(replace(on.gpus[1], uuid="GPU-abc", position=2),))
    # Not its name: "invalid literal for int() with base 10: 'GPU-abc'", says vLLM 0.22.
    assert plain(third).startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2 vllm serve")
