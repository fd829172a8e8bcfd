"""Every log of logs/ gets its causes, its changed flags and a budget that adds up."""

import shlex
from pathlib import Path

import pytest

from snugvl.diagnose.explain import explain_file
from snugvl.diagnose.result import to_json, to_text

LOGS = Path(__file__).parent / "logs"
GIB = 1 << 30
ROUNDING = 40 << 20  # logs print two decimals of a GiB, some of them one

PLANNED = "as planned"  # the value is the planner's; `test_replan.py` compares it

# log: (causes, the surest first; changed flags and their values, None: removed)
EXPECTED: dict[str, tuple[str, dict[str, str | None]]] = {
    "docker_shm": ("shared_memory", {}),
    "hf_architecture_old": ("architecture", {}),
    "hf_bnb_dispatch_4060": ("cpu_offload", {}),
    "hf_fp8_3090": ("fp8_kernels", {}),
    "hf_meta_offload": ("cpu_offload", {}),
    "hub_gated_llama": ("model_access", {}),
    "hub_missing": ("model_access", {}),
    "kernel_oom_kill": ("host_killed", {}),
    "llamacpp_context": ("context", {"-c": "4096"}),
    "llamacpp_image_assert": ("image_buffer", {"--image-max-tokens": "1024"}),
    "llamacpp_weights": ("weights", {}),
    "ollama_host_memory": ("host_memory", {}),
    "ollama_prompt_cut": ("prompt_too_long", {}),
    "shell_killed_wsl2": ("host_killed", {}),
    "torch_capacty_fragmented": ("fragmentation", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "torch_driver_old": ("driver", {}),
    "torch_new_others_8g": ("tenants", {}),
    "torch_old_fragmented": ("fragmentation tenants", {}),
    "torch_other_process_named": ("tenants", {}),
    "torch_sm120_5070ti": ("driver", {}),
    "torch_spill_8g_windows": ("spill", {}),
    "two_starts_last_counts": ("vision_profile", {"--max-model-len": PLANNED}),
    "vllm010_llama31_context_3090": ("context", {"--max-model-len": "42496"}),
    "vllm0110_overfree_laptop": ("utilisation_over_free tenants", {"--gpu-memory-utilization": PLANNED}),
    "vllm012_bf16_t4": ("dtype", {"--dtype": "half"}),
    "vllm012_fp8_method_t4": ("fp8_kernels", {}),
    "vllm017_encoder_cache": ("encoder_cache", {"--mm-processor-kwargs": '{"max_pixels":2097152}'}),
    "vllm0180_load_failed_v1runner": ("weights", {}),
    "vllm0191_cudagraph_4060": ("cuda_graphs", {"--max-num-seqs": "8"}),
    "vllm024_uva_4050_wsl2": ("uva", {"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}),
    "vllm029_disturbed": ("profiling_disturbed", {}),
    "vllm030_uva_5050_docker": ("uva", {"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"}),
    "vllm022_gpu_names": ("settings", {}),
    "vllm033_ansi_tied_head": ("vision_profile tied_head", {"--limit-mm-per-prompt": '{"image":1,"video":0}'}),  # noqa: E501
    "vllm033_port": ("port", {"--port": "8001"}),
    "vllm033_prompt_long": ("prompt_too_long", {"--max-model-len": "13312"}),
    "vllm033_q2b_context_4060": ("context", {"--max-model-len": PLANNED}),
    "vllm033_q4bfp8_5060_wsl2": (
        "vision_profile",
        {"--mm-processor-kwargs": PLANNED, "--max-model-len": PLANNED, "--gpu-memory-utilization": PLANNED},
    ),
    "vllm033_q4bfp8_overfree_5060_wsl2": (
        "utilisation_over_free tenants",
        {"--gpu-memory-utilization": PLANNED, "--mm-processor-kwargs": PLANNED},
    ),
    "vllm033_q8b_vision_negative": ("weights vision_profile", {}),
    "vllm033_q8b_weights_oom_5060": ("weights tenants", {}),
    "vllm033_too_many_images": ("too_many_images", {"--limit-mm-per-prompt": '{"image":4}'}),
    "vllm033_unknown_flags": (
        "unknown_flag removed_switch",
        {"--disable-v1-engine": None, "--swap-space": None, "VLLM_USE_V1": None,
         "--gpu-memory-utilization": "0.8"},
    ),
    "vllm033_vision_oom_profile": ("vision_profile weights", {}),
    "vllm03_qwen15_tokens_3090": ("context", {"--max-model-len": "6912"}),
    "vllm064_block_manager": ("removed_switch", {"--use-v2-block-manager": None}),
    "vllm06_disturbed_bytes": ("profiling_disturbed", {}),
    "vllm07_v0_qwen25_4060_wsl2": ("utilisation_low", {}),  # what others hold is not in it: no value is named
    "vllm085_fp8e4nv_3090": ("fp8_kernels", {}),  # its --enable-reasoning is wanted until 0.10
    "vllm08_sampler_warmup_3060": ("batch", {"--max-num-seqs": "8"}),
    "vllm090_fp8_kernel_image_5090": ("fp8_kernels", {}),
    "vllm091_overfree_shared_server": (
        "utilisation_over_free tenants",
        {"--gpu-memory-utilization": PLANNED},
    ),
    "vllm09_context_length_http": ("prompt_too_long", {"--max-model-len": "6144"}),
    "wsl2_make_resident": ("residency", {}),
}  # fmt: skip
HEALTHY = {path.stem for path in LOGS.glob("healthy_*.log")}

# log: (total, ceiling, weights, KV cache) in GiB as the log has them
BUDGETS = {
    "vllm033_q4bfp8_5060_wsl2": (7.96, 6.77, 5.21, -0.72),
    "vllm033_q8b_vision_negative": (15.92, 14.65, 16.62, -4.24),
    "vllm07_v0_qwen25_4060_wsl2": (8.00, 5.60, 5.20, -1.05),
    "healthy_vllm022_q4bfp8_3090": (23.56, 21.2, 5.2, 12.62),
    "healthy_vllm033_q2bfp8_4060_wsl2": (8.00, 6.40, 2.98, 2.62),
}


def test_every_log_is_in_the_table() -> None:
    own = {path.stem for path in LOGS.glob("*.log") if not path.stem.startswith("thread_")}  # test_threads.py
    assert own == set(EXPECTED) | HEALTHY | {"unknown_engine"}
    assert len(EXPECTED) >= 40


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_cause_and_the_changed_flags(name: str) -> None:
    found = explain_file(LOGS / f"{name}.log")
    causes, flags = EXPECTED[name]
    assert [cause.kind for cause in found.causes] == causes.split()
    assert all(cause.evidence for cause in found.causes)
    changed = {change.flag: change.new for change in found.changes}
    flags = {flag: changed.get(flag) if value is PLANNED else value for flag, value in flags.items()}
    assert flags.items() <= changed.items()
    if not flags and "fragmentation" not in causes:
        assert not changed
    if found.command:
        words = shlex.split(found.command)
        for flag, value in flags.items():
            joint = value if value and flag.startswith("-") else None
            if value is None:
                assert flag not in found.command.replace(f"{flag}-", "")
            elif joint:
                assert words[words.index(flag) + 1] == value
            else:
                assert f"{flag}={value}" in words


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_evidence_is_a_line_of_the_log(name: str) -> None:
    lines = (LOGS / f"{name}.log").read_text().splitlines()
    for cause in explain_file(LOGS / f"{name}.log").causes:
        for evidence in cause.evidence:
            assert evidence.text.strip("…").split()[-1] in lines[evidence.line - 1]


@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_healthy_log_has_no_cause(name: str) -> None:
    found = explain_file(LOGS / f"{name}.log")
    assert found.healthy
    assert not found.causes
    assert not found.changes
    assert "No failure found" in to_text(found)


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_the_budget_is_the_logs_own_and_adds_up(name: str) -> None:
    budget = explain_file(LOGS / f"{name}.log").budget
    parts = {part.name.split(" (")[0]: part.nbytes / GIB for part in (*budget.frame, *budget.uses)}
    shown = tuple(parts[key] for key in ("total", "ceiling", "weights", "KV cache"))
    assert shown == pytest.approx(BUDGETS[name], abs=0.01)
    assert budget.remainder_bytes is not None
    assert abs(budget.remainder_bytes) <= ROUNDING


@pytest.mark.parametrize("name", ["torch_new_others_8g", "torch_other_process_named"])
def test_pytorchs_parts_add_up_to_the_card(name: str) -> None:
    budget = explain_file(LOGS / f"{name}.log").budget
    assert {part.name for part in budget.uses} >= {"tensors of this process", "other processes"}
    assert budget.remainder_bytes is not None
    free = next(part.nbytes for part in budget.frame if part.name.startswith("free"))
    assert abs(budget.remainder_bytes - free) <= ROUNDING


def test_the_last_start_counts_and_that_is_said() -> None:
    found = explain_file(LOGS / "two_starts_last_counts.log")
    assert found.starts == 2
    assert any("2 starts" in note for note in found.notes)


def test_the_engines_own_advice_is_judged() -> None:
    def advice(name: str) -> str:
        return explain_file(LOGS / f"{name}.log").advice

    assert "wrong here, 0.85 is already all that is free" in advice("vllm033_q4bfp8_5060_wsl2")
    assert "wrong here, 0.92 is already" in advice("vllm033_q8b_vision_negative")
    assert "right here" in advice("vllm07_v0_qwen25_4060_wsl2")
    assert "does not limit the weights" in advice("vllm0180_load_failed_v1runner")
    assert "shapes the profile only" in advice("vllm017_encoder_cache")


def test_an_unknown_log_is_not_guessed_at() -> None:
    found = explain_file(LOGS / "unknown_engine.log")
    assert not found.recognised
    assert not found.causes
    assert to_text(found).startswith("Not recognised: snugvl knows no line of this log, of ")


def test_a_log_cut_off_after_loading_is_not_called_healthy() -> None:
    found = explain_file(LOGS / "vllm033_q4bfp8_5060_wsl2.log")
    assert found.gpu == "GeForce RTX 5060"
    assert found.wsl2
    assert found.version == "0.33.0"
    assert found.model == "Qwen/Qwen3-VL-4B-Instruct-FP8"
    assert '"kind": "vision_profile"' in to_json(found)


def test_colours_are_taken_off() -> None:
    found = explain_file(LOGS / "vllm033_ansi_tied_head.log")
    assert found.causes[0].evidence[0].text.startswith("(EngineCore pid=936) INFO")
