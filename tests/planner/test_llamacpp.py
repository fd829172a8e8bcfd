"""What llama.cpp takes of a GGUF, beside its logs; what the plan makes of that; how fast people find it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from training.gguf_export import export

from snugvl.checkpoint.gguf_network import BLOCKS
from snugvl.checkpoint.locate import POCKET
from snugvl.checkpoint.read import facts_of
from snugvl.cli.serve_plan import on_device
from snugvl.core.sizes import GIB
from snugvl.hardware.calibration import DATA_CENTRE_CONTEXT_BYTES
from snugvl.hardware.describe import describe
from snugvl.hardware.devices import with_others
from snugvl.hardware.machine import Machine
from snugvl.planner.capabilities import options
from snugvl.planner.commands import plain_command, visible
from snugvl.planner.engines.llamacpp.footprint import (
    cache_bytes,
    decoder_bytes,
    host_bytes,
    placed,
    snapshot_bytes,
    tower_bytes,
)
from snugvl.planner.engines.llamacpp.ggml import Graph, compute_bytes
from snugvl.planner.engines.llamacpp.rules import RULES
from snugvl.planner.footprint.total import Device, footprint
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.plan import Choice
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.hardware.listings import LISTINGS

MIB = 1 << 20
RECORDED = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/llamacpp/buffers.json").read_text(encoding="utf-8")
)
CELLS = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/h200/llamacpp_cells.json").read_text(encoding="utf-8")
)["rows"]
NAMES = {size: f"Qwen/Qwen3-VL-{size}-Instruct" for size in ("2B", "4B", "8B")} | {
    "3.5-4B": "Qwen/Qwen3.5-4B",
    "30B": "Qwen/Qwen3-VL-30B-A3B-Instruct",
}
SIDE = 32  # pixels of a token

Load = Callable[..., Inventory]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A model of the catalogue as a GGUF of its exact shape, without weights."""
    folder = tmp_path_factory.mktemp("ggufs")
    made: dict[tuple[str, str], Inventory] = {}

    def get(name: str, kind: str = "Q4_K_M") -> Inventory:
        if (name, kind) not in made:
            path = folder / f"{name.rpartition('/')[2]}-{kind}.gguf"
            export(name, path, kind, words=1)
            made[name, kind] = inventory(facts_of(str(path)))
        return made[name, kind]

    return get


def settings_of(row: dict[str, Any]) -> Settings:
    return Settings(
        "llamacpp", kv=row["kv"], context=row["context"], concurrency=row["slots"], chunk=row["chunk"],
        max_pixels=row["image_tokens"] * SIDE**2, on_gpu=False,
    )  # fmt: skip


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: "-".join(str(row[key]) for key in list(row)[:7]))
def test_every_buffer_is_what_llama_cpp_said(load: Load, row: dict[str, Any]) -> None:
    model, settings, taken = load(row["model"], row["type"]), settings_of(row), row["taken"]
    weights = placed(model, settings, gpu=False)
    tower = weights.pop("vision tower")
    cache, states = cache_bytes(model, settings, gpu=False)
    exact = {
        "weights": sum(weights.values()),
        "KV cache": cache,
        "recurrent state": states,
        "vision tower": tower,
    }
    for name, nbytes in exact.items():
        assert nbytes / MIB == pytest.approx(taken[name], rel=1e-3, abs=0.6), name
    decoder = decoder_bytes(model, settings, gpu=False) / MIB
    assert decoder == pytest.approx(taken["compute buffer"], rel=0.15)
    assert decoder == pytest.approx(row["planned"]["compute buffer"], abs=0.01), (
        "written down by today's plan"
    )
    # llama.cpp reserves for 2,116 tokens at its start, and grows with a larger picture.
    assert tower_bytes(model, settings.max_pixels) / MIB == pytest.approx(
        taken["mmproj compute buffer"], rel=0.07
    )


def test_all_of_it_is_within_three_percent(load: Load) -> None:
    assert len(RECORDED) >= 30
    for row in RECORDED:
        planned, taken = sum(row["planned"].values()), sum(row["taken"].values())
        assert abs(planned - taken) <= max(0.03 * taken, 96), row


@pytest.mark.parametrize("model", ["2B", "3.5-4B", "4B", "8B", "30B"])
@pytest.mark.sample("2B", "4B")
def test_a_process_on_a_gpu_is_within_three_percent(load: Load, model: str) -> None:
    """What `benchmarks/llamacpp_cells.py` measured on an H200, with the flags that it ran with."""
    rows = [row for row in CELLS if row["model"] == model and "flags" in row]
    assert rows
    for row in rows:
        flags = row["flags"]
        gguf = load(NAMES[model], row["kind"])
        pixels = int(flags["--image-max-tokens"]) * SIDE**2
        settings = Settings(
            "llamacpp", kv="fp8" if "-ctk" in flags else "bf16", context=row["context"],
            concurrency=row["slots"], chunk=int(flags["-ub"]), max_pixels=pixels,
            offloaded=gguf.facts.text.num_layers + 1 - int(flags["-ngl"]),
            host_experts=int(flags.get("--n-cpu-moe", 0)),
        )  # fmt: skip
        place = Device(DATA_CENTRE_CONTEXT_BYTES, compute_capability=(9, 0))
        off = footprint(gguf, settings, place).total_bytes - row["taken_bytes"]
        assert abs(off) <= max(0.03 * row["taken_bytes"], 96 * MIB), (row["name"], off / MIB)


def test_a_node_takes_its_parents_place_only_where_nobody_else_looks() -> None:
    graph = Graph()
    first = graph.add(1024)
    second = graph.over(first)  # in its place
    kept = graph.over(second)  # in its place
    graph.add(1024, kept)
    graph.add(1024, kept)  # `kept` lives until here
    assert compute_bytes(graph) == 3 * 1024
    graph = Graph()
    first = graph.add(1024)
    beside = graph.over(first)  # not in its place: `first` is looked at later
    graph.add(1024, first, beside)
    assert compute_bytes(graph) == 3 * 1024


@pytest.mark.parametrize("sizes", [(1024, 4096), (4096, 1024)])
def test_holes_are_filled_by_what_fits_best(sizes: tuple[int, int]) -> None:
    graph = Graph()
    first, wall, second, end = (graph.add(nbytes) for nbytes in (sizes[0], 128, sizes[1], 128))
    graph.add(0, first, second)  # both are free from here on
    graph.add(1024)  # into the hole that holds it exactly, wherever that is
    graph.add(4096)
    graph.add(0, wall, end)
    assert compute_bytes(graph) == 1024 + 4096 + 2 * 128


def test_inputs_and_outputs_keep_their_places() -> None:
    graph = Graph()
    given = graph.input(2048)
    graph.add(1024, given, output=True)
    graph.add(2048)
    graph.add(1024)
    assert compute_bytes(graph) == 2048 + 1024 + 1024, "the input's place is free again, the output's is not"


def plan(model: Inventory, gpu: str, **wishes: Any) -> Choice:
    machine = describe(gpu, ram="32GiB")
    return require(solve([Candidate(model.facts)], machine, Wishes(**wishes)))


def test_a_gguf_is_llama_cpps_or_ours(load: Load) -> None:
    model = load("Qwen/Qwen3-VL-2B-Instruct")
    found, refused = options(model, Device(0), "linux", Wishes())
    assert {option.engine for option in found} == {"llamacpp", "native"}
    assert {refusal.engine for refusal in refused} == {"transformers", "vllm"}
    assert all("GGUF" in refusal.text for refusal in refused)
    mixture = load("Qwen/Qwen3-VL-30B-A3B-Instruct")
    found, refused = options(mixture, Device(0), "linux", Wishes())
    assert {option.engine for option in found} == {"llamacpp", "native"}
    assert mixture.facts.gguf is not None
    unlike = replace(mixture.facts.gguf, why_not="no such blocks here: use --backend llamacpp")
    found, refused = options(inventory(replace(mixture.facts, gguf=unlike)), Device(0), "linux", Wishes())
    assert {option.engine for option in found} == {"llamacpp"}
    assert "--backend llamacpp" in next(each.text for each in refused if each.engine == "native")


def test_our_engine_takes_a_gguf_by_wish_or_where_there_is_no_llama_cpp(load: Load) -> None:
    facts = load("Qwen/Qwen3-VL-2B-Instruct").facts
    candidate, gpu = [Candidate(facts)], describe("RTX 5060", ram="32GiB")
    missing = {"llamacpp": "it is not installed"}

    def engine(machine: Machine, missing: Mapping[str, str], **wishes: Any) -> str | None:
        choice = solve(candidate, machine, Wishes(**wishes), missing).choice
        return choice and choice.option.engine

    assert engine(gpu, {}) == "llamacpp"
    assert engine(gpu, missing) == "native"
    assert engine(gpu, {}, backend="native") == "native"
    assert engine(replace(gpu, gpus=()), missing) is None, "on a processor it would be slow"
    assert engine(replace(gpu, gpus=()), {}, backend="native") == "native"
    plan = solve(candidate, gpu, Wishes(backend="native"))
    settings = require(plan).settings
    stored = sum(tensor.nbytes for tensor in facts.tensors if tensor.dtype in BLOCKS)
    wide = sum(2 * prod(tensor.shape) for tensor in facts.tensors if tensor.dtype not in BLOCKS)
    weights = sum(part.nbytes for part in require(plan).footprint.components if "weights: " in part.name)
    assert settings.vision_weights == settings.head == "bf16"
    assert weights == stored + wide


def test_a_plan_is_a_command(load: Load) -> None:
    choice = plan(load("Qwen/Qwen3-VL-2B-Instruct"), "RTX 5060")
    words = plain_command(choice).split()
    assert words[:2] == ["llama-server", "-m"]
    assert words[words.index("--mmproj") + 1].endswith("mmproj-Qwen3-VL-2B-Instruct-Q4_K_M.gguf")
    assert words[words.index("-ngl") + 1] == "29", "28 layers and the head"
    assert words[words.index("-c") + 1] == str(choice.settings.context)
    assert words[words.index("--image-max-tokens") + 1] == str(choice.tokens)
    assert words[words.index("-fit") + 1] == "off"
    assert "--no-warmup" not in words
    small = plan(load("Qwen/Qwen3-VL-2B-Instruct"), "RTX 5060", max_pixels=1024 * 1024)
    assert "--no-warmup" in plain_command(small), "which would take more than any picture"
    alone = plan(load("Qwen/Qwen3-VL-2B-Instruct"), "RTX 5060", images=0)
    assert "--mmproj" not in plain_command(alone)
    several = plan(load("Qwen/Qwen3-VL-2B-Instruct"), "RTX 5060", concurrency=3, context=4096)
    words = plain_command(several).split()
    assert (words[words.index("-c") + 1], words[words.index("-np") + 1]) == (str(3 * 4096), "3")


def test_without_a_gpu_all_is_in_host_memory(load: Load) -> None:
    model = load("Qwen/Qwen3-VL-2B-Instruct")
    choice = plan(model, "none")
    assert (
        sum(placed(model, choice.settings, gpu=True).values())
        == placed(model, choice.settings, gpu=True)["lm_head"]
    )
    assert "-dev none" in plain_command(choice)
    assert choice.footprint.named("weights") == sum(tensor.nbytes for tensor in model.facts.tensors)


def test_experts_go_to_host_memory_first(load: Load) -> None:
    model = load("Qwen/Qwen3-VL-30B-A3B-Instruct")
    choice = plan(model, "RTX 5060")
    assert 0 < choice.settings.host_experts < 48
    assert (choice.settings.offloaded, choice.settings.vision) == (0, "gpu")
    assert f"--n-cpu-moe {choice.settings.host_experts}" in plain_command(choice)
    assert choice.footprint.total_bytes <= choice.budget.usable_bytes
    fewer = choice.settings._replace(host_experts=choice.settings.host_experts - 1)
    moved = sum(placed(model, fewer, gpu=True).values()) - sum(
        placed(model, choice.settings, gpu=True).values()
    )
    assert choice.spare_bytes < moved, "no more of them than needed"
    assert host_bytes(model, fewer) == host_bytes(model, choice.settings) - moved


def test_layers_leave_beside_the_cache_that_was_asked_for(load: Load) -> None:
    """With the wider one more of them would."""
    model, least = load("Qwen/Qwen3-VL-8B-Instruct", "Q8_0"), dict[str, int]()
    for kv in ("bf16", "fp8"):
        choice = plan(model, "RTX 5060", context=32768, kv_cache=kv)
        assert choice.settings.kv == kv
        assert ("-ctk q8_0" in plain_command(choice)) == (kv == "fp8")
        least[kv] = choice.settings.offloaded
    assert 0 < least["fp8"] < least["bf16"]


def test_layers_leave_before_the_tower(load: Load) -> None:
    base = Settings("llamacpp", max_pixels=1024 * SIDE**2)
    kinds = list(RULES.offload_ways(load("Qwen/Qwen3-VL-8B-Instruct", "Q8_0"), base))
    ways = [way for ways in kinds for way in ways]
    assert [(way.offloaded, way.vision) for way in ways[:2]] == [(0, "gpu"), (1, "gpu")]
    assert (ways[-1].offloaded, ways[-1].vision) == (36, "cpu")
    on_gpu = [sum(placed(load("Qwen/Qwen3-VL-8B-Instruct", "Q8_0"), way, gpu=True).values()) for way in ways]
    assert on_gpu[:37] == sorted(on_gpu[:37], reverse=True)


def test_states_are_kept_in_host_memory(load: Load) -> None:
    plain, hybrid = load("Qwen/Qwen3-VL-4B-Instruct"), load("Qwen/Qwen3.5-4B")
    settings = Settings("llamacpp", context=4096, chunk=512, concurrency=2)
    states = cache_bytes(hybrid, settings, gpu=True)[1]
    assert (snapshot_bytes(plain, settings), snapshot_bytes(hybrid, settings)) == (0, states // 2)
    choice = plan(hybrid, "none")
    assert "--ctx-checkpoints 4" in plain_command(choice)
    assert choice.footprint.named("state snapshots") == 4 * snapshot_bytes(hybrid, choice.settings)
    assert "--ctx-checkpoints" not in plain_command(plan(plain, "none"))


def test_quantised_caches_are_smaller_and_need_room_on_a_gpu(load: Load) -> None:
    model = load("Qwen/Qwen3-VL-4B-Instruct")
    half = Settings("llamacpp", kv="fp8", context=32768, chunk=512)
    assert half.kv_name == "q8_0"
    whole = half._replace(kv="bf16")
    assert cache_bytes(model, half, gpu=True)[0] * 32 == cache_bytes(model, whole, gpu=True)[0] * 17
    more = decoder_bytes(model, half, gpu=True) - decoder_bytes(model, whole, gpu=True)
    assert more == 2 * 2 * 8 * 128 * 32768, "one layer's keys and values in f16, for flash attention"


@pytest.mark.parametrize(
    ("name", "kind", "peak_gib"),
    [("2B", "Q8_0", 3.84), ("2B", "Q4_K_M", 3.16), ("4B", "Q8_0", 6.23), ("4B", "Q4_K_M", 4.57)],
)
def test_the_whole_process_on_a_gpu(load: Load, name: str, kind: str, peak_gib: float) -> None:
    # Measured on an H200 by NVML (anchors, "Measured side by side"): one slot, 2,048 tokens, a 1024² picture;
    # what llama.cpp reserves for one of 2,116 tokens.
    model = load(f"Qwen/Qwen3-VL-{name}-Instruct", kind)
    settings = Settings("llamacpp", context=2048, chunk=512, max_pixels=2116 * SIDE**2)
    found = footprint(model, settings, Device(DATA_CENTRE_CONTEXT_BYTES, compute_capability=(9, 0)))
    assert found.total_bytes / (1 << 30) == pytest.approx(peak_gib, rel=0.03)


def test_a_mixture_with_experts_in_host_memory(load: Load) -> None:
    model = load("Qwen/Qwen3-VL-30B-A3B-Instruct")
    choice = plan(model, "RTX 2080", images=0)
    assert choice.speed.decode_tokens_per_s is not None
    assert 33.7 / 1.3 <= choice.speed.decode_tokens_per_s <= 33.7 * 1.3, "published: part in host memory"


def test_weights_in_host_memory_pass_through_the_compute_buffer(load: Load) -> None:
    """One tensor after the other: a step of a prompt computes with copies of them on the GPU."""
    for name, change in (
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", {"host_experts": 3}),
        ("Qwen/Qwen3-VL-8B-Instruct", {"offloaded": 3}),
    ):
        model = load(name)
        base = Settings("llamacpp", context=4096, chunk=512)
        all_there = decoder_bytes(model, base, gpu=True)
        largest = max(
            tensor.nbytes
            for tensor in model.facts.tensors
            if tensor.name.startswith(("blk.0.", "blk.1.", "blk.2.")) and tensor.role in ("expert", "linear")
        )
        assert decoder_bytes(model, base._replace(**change), gpu=True) - all_there == largest > 20 * MIB
        few = base._replace(chunk=16)
        assert decoder_bytes(model, few._replace(**change), gpu=True) == decoder_bytes(model, few, gpu=True)


def on(name: str) -> Machine:
    """A machine of other people: see `tests/hardware/listings.py`."""
    each = LISTINGS[name]
    bare = Machine("linux", (), 8, each.ram_gib * GIB, each.free_gib * GIB, 100 * GIB)
    return with_others(bare, each.text)


@pytest.mark.parametrize("name", [name for name in LISTINGS if name not in ("rx-9070-xt-too-new",)])
def test_other_makers_gpus_have_plans_of_their_own(load: Load, name: str) -> None:
    model, machine = load("Qwen/Qwen3-VL-4B-Instruct"), on(name)
    found = solve([Candidate(model.facts)], machine, Wishes())
    choice, gpu = require(found), machine.others[0]
    words = plain_command(choice).split()
    assert words[words.index("-dev") + 1] == gpu.listed
    assert choice.budget.name == gpu.name
    assert choice.footprint.total_bytes < gpu.free_bytes
    assert not visible(choice), "no variable of CUDA's"
    text = plain(report(found, machine))
    assert "CUDA" not in text
    assert "NVIDIA" not in text or "NVIDIA" in gpu.name
    if gpu.unified:
        assert choice.footprint.named("beside the GPU") > 300 << 20
        assert choice.footprint.total_bytes < machine.ram_free_bytes
    # All of the file is somewhere: nothing is computed by the processor where the card is large enough.
    assert bool(choice.settings.offloaded) == (name == "rx-6950-xt-in-use")


def test_a_mac_that_is_too_small_is_told_so_in_its_own_words(load: Load) -> None:
    machine = on("macbook-m1-8gb")
    found = solve([Candidate(load("Qwen/Qwen3-VL-8B-Instruct").facts)], machine, Wishes())
    assert found.choice is None
    text = plain(report(found, machine))
    assert "wherever its layers are computed" in text
    assert "use a file with fewer bits a weight, a smaller model, or a machine with more memory" in text
    assert "of the GPU's" not in text


def test_other_makers_gpus_are_for_ggufs_alone(load: Load) -> None:
    machine = on("rx-6700-xt-rocm")
    checkpoint = solve([Candidate(facts_of(POCKET))], machine, Wishes())
    assert require(checkpoint).budget.name == "host memory"
    facts = load("Qwen/Qwen3-VL-4B-Instruct").facts
    assert (
        require(solve([Candidate(facts)], on_device("cpu", machine), Wishes())).budget.name == "host memory"
    )
    assert require(solve([Candidate(facts)], on_device("auto", machine), Wishes())).budget.gpu is not None
