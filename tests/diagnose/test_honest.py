"""No statement that a person could act on and be worse off: what is certain is so, and a changed command is safe."""

# ruff: noqa: E501 - lines of logs

import itertools
import re
import shlex
from pathlib import Path

import pytest

from snugvl.diagnose.command import arguments
from snugvl.diagnose.explain import explain, explain_file
from snugvl.diagnose.facts import gather
from snugvl.diagnose.result import Diagnosis, to_text
from snugvl.diagnose.scan import blocks, scan

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))
GIB = 1 << 30
TENANTS = {"4101": 7.25, "4102": 5.5, "4103": 4.0, "4104": 3.75, "4105": 2.5, "4106": 1.25}
BESIDE_SIX = f"""\
$ vllm serve Qwen/Qwen3-VL-8B-Instruct-FP8 --gpu-memory-utilization 0.95 --max-model-len 32768
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:299] vLLM API server version 0.31.0
(EngineCore pid=2) INFO 11-21 22:30:11 [gpu_model_runner.py:4200] Starting to load model Qwen/Qwen3-VL-8B-Instruct-FP8...
(EngineCore pid=2) INFO 11-21 22:30:31 [gpu_model_runner.py:4700] Model loading took 10.1 GiB memory and 9.1 seconds
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224]   File "/opt/vllm/v1/worker/gpu_worker.py", line 571, in initialize_from_config
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224]   File "/opt/vllm/v1/worker/gpu_model_runner.py", line 6203, in _allocate_kv_cache_tensors
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224]     tensor = torch.zeros(kv_cache_tensor.size, dtype=torch.int8, device=self.device)
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 47.53 GiB of which 0.28 GiB is free. {" ".join(f"Process {pid} has {held:.2f} GiB memory in use." for pid, held in TENANTS.items())} Including non-PyTorch memory, this process has 23.00 GiB memory in use. Of the allocated memory 22.10 GiB is allocated by PyTorch, and 41.00 MiB is reserved by PyTorch but unallocated.
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""


def kinds(found: Diagnosis) -> list[str]:
    """The causes."""
    return [cause.kind for cause in found.causes]


def flags(found: Diagnosis) -> dict[str, str | None]:
    """What is changed."""
    return {change.flag: change.new for change in found.changes}


def test_six_tenants_are_named_and_the_command_leaves_them_their_memory() -> None:
    found = explain(BESIDE_SIX)
    assert kinds(found) == ["tenants"]
    said = found.causes[0].explanation
    assert "while the KV cache was allocated" in said
    assert "profil" not in said
    assert all(f"process {pid} {held:.2f} GiB" in said for pid, held in TENANTS.items())
    assert "together 24.25 GiB of 47.53 GiB" in said
    share = float(flags(found)["--gpu-memory-utilization"] or 1)
    assert 0.3 < share <= (47.53 - 24.25) / 47.53
    assert found.command is not None
    words = shlex.split(found.command)
    assert float(words[words.index("--gpu-memory-utilization") + 1]) == share


def test_in_a_container_its_own_process_is_not_taken_for_a_tenant() -> None:
    """There PyTorch lists all processes alike, its own among them."""
    inside = BESIDE_SIX.replace(
        "Including non-PyTorch memory, this process has 23.00 GiB", "Process 7 has 23.00 GiB"
    )
    assert "process 7" not in explain(inside).causes[0].explanation
    assert flags(explain(inside)) == flags(explain(BESIDE_SIX))


def test_without_a_word_of_others_no_share_is_named() -> None:
    alone = re.sub(r"Process \d+ has [\d.]+ GiB memory in use\. |Including non.*? in use\. ", "", BESIDE_SIX)
    alone = alone.replace("CUDA out of memory. Tried", "HIP out of memory. Tried")
    found = explain(alone)
    assert kinds(found) == ["out_of_memory"]
    assert "--gpu-memory-utilization" not in flags(found)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_no_share_is_above_what_others_leave_free(path: Path) -> None:
    found = explain_file(path)
    share = flags(found).get("--gpu-memory-utilization")
    with path.open("rb") as file:
        facts = gather(scan(blocks(file)))
    refused = dict.fromkeys(("unknown_flag", "removed_switch"))
    if share is None or refused.keys() & set(kinds(found)):
        return
    known = facts.free and facts.total
    assert float(share) <= (facts.utilisation or 0.9) or known
    if known and facts.free and facts.total:
        assert float(share) * facts.total.nbytes <= facts.free.nbytes


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_changed_command_parses(path: Path) -> None:
    found = explain_file(path)
    if found.command:
        words = shlex.split(found.command)
        assert "serve" in words or "vllm" in found.command
        names = [word for word in words if word.startswith("--")]
        assert len(names) == len(set(names))


ENCODED = """\
0.12.001.100 I slot update_slots: id  0 | task 0 | encoding mtmd batch from idx = 1, n_chunks = 1
0.12.001.200 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4514.05 MiB on device 0: cudaMalloc failed: out of memory
0.12.001.300 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 4733328896
"""


def test_a_picture_of_newer_llama_servers_is_a_picture() -> None:
    (cause,) = explain(ENCODED).causes
    assert (cause.kind, cause.confidence) == ("image_buffer", "likely")
    client = ENCODED.replace("from idx = 1, n_chunks = 1", "n_chunks = 1 (done = 0, total = 3)")
    assert kinds(explain(client)) == ["image_buffer"]


def test_a_picture_that_was_encoded_is_not_to_blame() -> None:
    lines = ENCODED.splitlines(keepends=True)
    done = "0.12.001.150 I mtmd batch encoding done in 320 ms\n"
    found = explain(lines[0] + done + lines[1] + lines[2])
    assert kinds(found) == ["compute_buffer"]
    assert found.causes[0].confidence == "likely"  # no line names the buffer
    named = explain(
        lines[0] + done + lines[1] + lines[2] + "graph_reserve: failed to allocate compute buffers\n"
    )
    assert (kinds(named), named.causes[0].confidence) == (["compute_buffer"], "certain")


def test_what_a_start_survived_is_no_failure() -> None:
    lines = ENCODED.splitlines(keepends=True)
    up = "main: server is listening on http://127.0.0.1:8080 - starting the main loop\n"
    assert explain(lines[1] + lines[2] + up).healthy
    assert kinds(explain(up + lines[1] + lines[2])) == ["compute_buffer"]


@pytest.mark.parametrize(
    ("line", "name", "free"),
    [
        ("using device CUDA0 (NVIDIA GeForce RTX 4060) (0000:01:00.0) - 7043 MiB free", "GeForce RTX 4060", 7043),
        ("using device Vulkan0 (AMD Radeon Graphics (RADV GFX1151)) (0000:c5:00.0) - 90112 MiB free", "AMD Radeon Graphics (RADV GFX1151)", 90112),
        ("using device SYCL0 (Intel(R) Arc(TM) A770 Graphics) (unknown id) - 15473 MiB free", "Intel(R) Arc(TM) A770 Graphics", 15473),
        ("using device Metal (Apple M1) - 5461 MiB free", "Apple M1", 5461),
        ("using device Vulkan0 (Intel(R) UHD Graphics 630 (CFL GT2)) - 8000 MiB free", "Intel(R) UHD Graphics 630 (CFL GT2)", 8000),
    ],
)  # fmt: skip
def test_names_are_not_cut_at_a_bracket(line: str, name: str, free: int) -> None:
    found = explain(f"llama_model_load_from_file_impl: {line}\n" + ENCODED)
    assert found.gpu == name
    assert found.causes
    facts = gather(scan([f"llama_model_load_from_file_impl: {line}\n".encode()]))
    assert facts.free is not None
    assert facts.free.nbytes == free << 20


def test_nested_values_of_vllms_list_are_not_cut_at_a_bracket() -> None:
    cut = arguments(
        "model='org/m', limit_mm_per_prompt={'image': {'count': 2, 'width': 512}, 'video': 0}, port=1, level=<L.O2"
    )
    assert cut["limit_mm_per_prompt"] == {"image": {"count": 2, "width": 512}, "video": 0}
    assert cut["port"] == 1


LISTED = """\
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:299] vLLM API server version 0.31.0
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:253] non-default args: {'model_tag': 'org/m', 'model': 'org/m'}
"""


def test_a_command_that_is_not_shown_is_not_spoken_of() -> None:
    hidden = explain(LISTED + "ValueError: the lattice broke\n")
    assert hidden.command is None
    assert "put together" not in to_text(hidden)
    shown = explain(LISTED + "OSError: [Errno 98] Address already in use\n")
    assert shown.command == "vllm serve org/m --port 8001"
    assert "put together" in to_text(shown)


TOWER = """\
$ vllm serve Qwen/Qwen3-VL-4B-Instruct-FP8
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:299] vLLM API server version 0.31.0
(EngineCore pid=2) INFO 11-21 22:30:31 [gpu_model_runner.py:4700] Model loading took 5.2 GiB memory and 9.1 seconds
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224]   File "/opt/vllm/v1/worker/gpu_worker.py", line 401, in determine_available_memory
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224]   File "/opt/vllm/model_executor/models/qwen3_vl.py", line 1420, in _process_image_input
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224]     image_embeds = self.visual(pixel_values, grid_thw=grid_thw)
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 7.96 GiB of which 0.61 GiB is free. Including non-PyTorch memory, this process has 6.70 GiB memory in use. Of the allocated memory 6.20 GiB is allocated by PyTorch, and 41.00 MiB is reserved by PyTorch but unallocated.
"""


def test_memory_that_ends_in_the_towers_frames_is_the_encoders() -> None:
    found = explain(TOWER)
    assert kinds(found) == ["vision_profile", "tenants"]
    assert "in the vision encoder, which vLLM profiles" in found.causes[0].explanation
    assert "max_pixels" in (flags(found)["--mm-processor-kwargs"] or "")
    serving = TOWER.replace("EngineCore pid=2) INFO", "EngineCore pid=2) _process_engine_step INFO")
    assert kinds(explain(serving))[0] == "serving_memory"
    by_transformers = "\n".join(re.sub(r"^.*?core.py:1224\] ", "", line) for line in TOWER.splitlines()[5:])
    (picture, *_) = explain(by_transformers.replace("/opt/vllm/model_executor", "transformers")).causes
    assert picture.kind == "image_buffer"
    assert "--image-max-tokens" not in to_text(explain(by_transformers))  # that is llama.cpp's


def test_frames_of_another_traceback_do_not_count() -> None:
    earlier = "\n".join(line for line in BESIDE_SIX.splitlines() if "kv_cache" in line or "Traceback" in line)
    assert "vision_profile" in kinds(
        explain(f"{TOWER.split(chr(10), 1)[0]}\n{earlier}\n{TOWER.split(chr(10), 1)[1]}")
    )


ANSWERED = """\
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:299] vLLM API server version 0.31.0
INFO:     Application startup complete.
INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK
(EngineCore pid=1) ERROR 05-05 12:36:59 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
OUT = "OutOfMemoryError: {} out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 7.96 GiB of which 7.00 GiB is free.\n"


@pytest.mark.parametrize("maker", ["CUDA", "HIP", "XPU", "NPU", "MUSA"])
@pytest.mark.sample("CUDA", "HIP", "MUSA")
def test_out_of_memory_is_known_in_any_makers_words(maker: str) -> None:
    for name in ("torch.", "torch.cuda.", ""):
        found = explain(name + OUT.format(maker))
        assert kinds(found) == ["out_of_memory"]
        assert found.budget.frame
        assert found.budget.needed_bytes == 8 * GIB


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: HIP error: out of memory",
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "!!! Exception during processing !!! Allocation on device ",
        "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "torch.AcceleratorError: CUDA error: out of memory",
        "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "ggml_metal_synchronize: error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "ROCm error: out of memory",
        "RuntimeError: CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_out_of_memory_without_a_number_is_known(line: str) -> None:
    found = explain(line + "\n")
    assert kinds(found) == ["out_of_memory"]
    assert not found.changes
    assert "GiB" not in found.causes[0].explanation


@pytest.mark.parametrize(
    ("line", "kind", "confidence"),
    [
        ("Out of memory: Killed process 4211 ((sd-pam)) total-vm:1kB, anon-rss:2kB", "host_killed", "certain"),
        ("subprocess.CalledProcessError: died with <Signals.SIGKILL: 9>.", "host_killed", "likely"),
        ("vllm-1 exited with code 137", "host_killed", "likely"),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "host_killed", "certain"),
        ("AssertionError: Torch not compiled with CUDA enabled", "driver", "certain"),
        ("RuntimeError: No CUDA GPUs are available", "driver", "certain"),
        ("MemoryError", "host_memory", "likely"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host_memory", "likely"),
        ("gguf_init_from_reader: failed to read tensor data", "checkpoint", "certain"),
        ("gguf_init_from_file: invalid magic characters: '<!DO', expected 'GGUF'", "checkpoint", "certain"),
        ("gguf_init_from_file: failed to open GGUF file 'm (1).gguf' (No such file or directory)", "model_access", "certain"),
        ("llama_model_load: error loading model: CLIP cannot be used as main model, use it with --mmproj instead", "projector", "certain"),
        ("ValueError: Unrecognized processing class in org/m. Can't instantiate a processor", "checkpoint", "certain"),
        ("OSError: Can't load image processor for 'org/m'. If you were trying to load it from", "checkpoint", "likely"),
        ("OSError: org/m does not appear to have a file named pytorch_model.bin, model.safetensors or tf_model.h5.", "checkpoint", "certain"),
        ("RuntimeError: unable to write to file </torch_88_1_0>: No space left on device (28)", "shared_memory", "certain"),
    ],
)  # fmt: skip
def test_siblings(line: str, kind: str, confidence: str) -> None:
    """What is said with other words; and what is only mostly so is not certain."""
    (cause, *_) = explain(line + "\n").causes
    assert (cause.kind, cause.confidence) == (kind, confidence)


def test_a_processor_on_the_cpu_is_not_called_a_missing_driver() -> None:
    text = to_text(explain("AssertionError: Torch not compiled with CUDA enabled\n"))
    assert "built for the CPU alone" in text
    assert "Install a driver" not in text


def test_a_file_that_cannot_be_opened_is_named_whole() -> None:
    line = "gguf_init_from_file: failed to open GGUF file 'a (copy).gguf' (No such file or directory)\n"
    assert (
        explain(line).causes[0].explanation == "a (copy).gguf could not be opened: No such file or directory."
    )


REFUSED_STEP = "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 838447104\nllama_context: failed to allocate compute buffers\n"


def test_a_change_never_asks_for_more_than_there_was() -> None:
    assert flags(explain("llama_context: n_ctx         = 2048\n" + REFUSED_STEP)) == {"-ub": "128"}
    assert "-c" in flags(explain("llama_context: n_ctx         = 8192\n" + REFUSED_STEP))
    warm = "$ vllm serve org/m --max-num-seqs {}\nRuntimeError: CUDA out of memory occurred when warming up sampler with {} dummy requests\n"
    assert not explain(warm.format(4, 4)).changes
    assert flags(explain(warm.format(64, 64))) == {"--max-num-seqs": "8"}


def test_a_change_keeps_what_else_the_user_asked_of_a_flag() -> None:
    images = "ValueError: At most 1 image(s) may be provided in one prompt.\n"
    command = '$ vllm serve org/m --limit-mm-per-prompt \'{"image":1,"video":2}\'\n'
    assert flags(explain(command + images)) == {"--limit-mm-per-prompt": '{"image":4,"video":2}'}
    assert not explain(command + images.replace("most 1", "most 6")).changes
    videos = explain(command + images.replace("1 image", "2 video"))
    assert flags(videos) == {"--limit-mm-per-prompt": '{"image":1,"video":4}'}
    kwargs = TOWER.replace("FP8\n", "FP8 --mm-processor-kwargs '{\"fps\":1}'\n", 1)
    assert flags(explain(kwargs))["--mm-processor-kwargs"].endswith("}")  # type: ignore[union-attr]
    assert '"fps":1' in (flags(explain(kwargs))["--mm-processor-kwargs"] or "")


def test_fewer_gpus_are_named_only_where_they_are_the_whole_matter() -> None:
    refused = "RuntimeError: World size (4) is larger than the number of available GPUs (2) in this node.\n"
    assert flags(explain("$ vllm serve org/m --tensor-parallel-size 4\n" + refused)) == {
        "--tensor-parallel-size": "2"
    }
    both = "$ vllm serve org/m --tensor-parallel-size 2 --pipeline-parallel-size 2\n"
    assert not explain(both + refused).changes


def test_a_wrapper_is_quoted_only_where_nothing_else_is_there() -> None:
    wrappers = [
        "llama_model_load: error loading model: llama_model_loader: failed to load model from m.gguf",
        "common_init_from_params: failed to load model 'm.gguf'",
        "srv    load_model: failed to load model, 'm.gguf'",
        "main: error: unable to load model",
        "ValueError: Failed to load model from file: m.gguf",
        "main: exiting due to model loading error",
    ]
    for first, second in itertools.pairwise(wrappers):
        found = explain(f"llama_model_load: error: the lattice is bent\n{first}\n{second}\n")
        assert "the lattice is bent" in found.causes[0].explanation, (first, second)
    assert "something failed, not why" in explain("\n".join(wrappers)).causes[0].explanation


def test_nothing_is_planned_with_cudas_numbers_for_other_makers() -> None:
    found = explain(TOWER.replace("CUDA out of memory", "HIP out of memory"))
    assert kinds(found)[0] == "vision_profile"
    assert not found.changes
    assert "--vram" not in to_text(found)


LOADING = """\
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:299] vLLM API server version 0.31.0
(EngineCore pid=2) INFO 11-21 22:30:11 [gpu_model_runner.py:4200] Starting to load model {}...
(EngineCore pid=2) ERROR 11-21 22:30:41 [core.py:1224] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 192.00 MiB. GPU 0 has a total capacity of 23.53 GiB of which 0.03 GiB is free. {} Including non-PyTorch memory, this process has {} GiB memory in use. Of the allocated memory {} GiB is allocated by PyTorch, and 41.00 MiB is reserved by PyTorch but unallocated.
"""


def test_weights_are_too_big_only_where_the_gpu_has_less() -> None:
    """A GPU that others have filled refuses small models, too; a smaller format is not what it lacks."""
    small, large = "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-32B-Instruct"
    beside = explain(LOADING.format(small, "Process 9 has 17.50 GiB memory in use.", "6.00", "5.60"))
    assert kinds(beside) == ["tenants"]
    assert "while the weights were loaded" in beside.causes[0].explanation
    assert "smaller format" not in to_text(beside)
    alone = explain(LOADING.format(large, "", "23.40", "22.90"))
    assert (kinds(alone), alone.causes[0].confidence) == (["weights"], "certain")
    unknown = explain(LOADING.format("org/m", "", "23.40", "22.90"))
    assert (kinds(unknown), unknown.causes[0].confidence) == (["weights"], "likely")
    fits = explain(LOADING.format(small, "", "23.40", "22.90"))
    assert kinds(fits) == ["out_of_memory"]


OLDER = "$ vllm serve org/m --enable-reasoning --reasoning-parser x --swap-space 4\nINFO vLLM API server version {}\nOSError: [Errno 98] Address already in use\n"


def test_a_flag_that_the_version_still_wants_stays() -> None:
    """What newer versions dropped is not taken from an older one's command."""
    assert explain(OLDER.format("0.8.5")).command == (
        "vllm serve org/m --enable-reasoning --reasoning-parser x --swap-space 4 --port 8001"
    )
    assert (
        explain(OLDER.format("0.17.0")).command
        == "vllm serve org/m --reasoning-parser x --swap-space 4 --port 8001"
    )
    assert explain(OLDER.format("0.33.0")).command == "vllm serve org/m --reasoning-parser x --port 8001"


def test_a_port_that_is_not_vllms_gets_no_flag_of_vllm() -> None:
    assert not explain("Error: listen tcp 127.0.0.1:11434: bind: address already in use\n").changes
    store = "$ vllm serve org/m --port 9000\nRuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
    found = explain(store)
    assert kinds(found) == ["port"]
    assert not found.changes
    assert "MASTER_PORT" in to_text(found)


def test_a_driver_that_is_there_is_not_called_missing() -> None:
    """NVML's other words are other causes."""
    reboot = explain("Failed to initialize NVML: Driver/library version mismatch\n")
    assert "different versions" in reboot.causes[0].explanation
    lost = explain("Failed to initialize NVML: Unknown Error\n")
    assert lost.causes[0].confidence == "likely"
    assert "Start the container anew" in to_text(lost)


def test_a_ceiling_is_not_the_card() -> None:
    """Weights that fill what is allowed of a card do not fill the card."""
    found = explain_file(LOGS[0].parent / "vllm07_v0_qwen25_4060_wsl2.log")
    assert kinds(found) == ["utilisation_low"]
    assert not found.changes
    assert "nvidia-smi" in to_text(found)
    assert "--held" in to_text(found)


def test_what_bytes_were_for_is_said() -> None:
    """A cache that a context would need is not a piece that was refused."""
    assert "KV cache that the whole context needs" in to_text(
        explain_file(LOGS[0].parent / "vllm029_disturbed.log")
    )
    assert "asked for last, and refused" in to_text(explain(TOWER.replace("CUDA out", "HIP out")))


def test_memory_that_vllm_itself_holds_is_not_called_others() -> None:
    """It looks at what is free when its own CUDA context is there."""
    line = "ValueError: Free memory on device ({}/8.0 GiB) on startup is less than desired GPU memory utilization (0.95, 7.6 GiB).\n"
    assert kinds(explain(line.format("7.5"))) == ["utilisation_over_free"]
    (_, others) = explain(line.format("6.9")).causes
    assert (others.kind, others.confidence) == ("tenants", "likely")
    assert explain(line.format("4.0")).causes[1].confidence == "certain"


def test_a_damaged_file_is_named_and_what_is_wrong_with_it() -> None:
    log = (
        "0.00.018.480 E gguf_init_from_reader: invalid magic characters: 'this', expected 'GGUF'\n"
        "0.00.018.488 E llama_model_load: error loading model: llama_model_loader: failed to load model from /m (1)/wrong.gguf\n"
        "0.00.018.509 E cmn  common_init_: failed to load model '/m (1)/wrong.gguf'\n"
    )
    (cause,) = explain(log).causes
    assert cause.kind == "checkpoint"
    assert "invalid magic characters: 'this', expected 'GGUF'" in cause.explanation
    assert cause.explanation.endswith("The file is /m (1)/wrong.gguf.")
    header = explain("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge\n")
    assert "HeaderTooLarge" in header.causes[0].explanation


def test_a_share_that_is_not_in_the_log_is_not_lowered_from_a_default() -> None:
    """0.85 is more than the 0.6 that somebody may have given."""
    unknown = explain(ANSWERED)
    assert kinds(unknown) == ["serving_memory"]
    assert "--gpu-memory-utilization" not in flags(unknown)
    assert "by 0.05 from what it was" in to_text(unknown)
    assert "leave it where it is less already" in to_text(unknown)
    given = explain("$ vllm serve org/m --gpu-memory-utilization 0.6\n" + ANSWERED)
    assert flags(given)["--gpu-memory-utilization"] == "0.55"
    assert "less already" not in to_text(given)


def test_no_note_replaces_the_pytorch_that_is_there() -> None:
    """A newest package may bring another PyTorch, of another maker's or none's GPU."""
    for log in LOGS:
        for note in explain_file(log).notes:
            assert not re.search(
                r"pip install (?:-U |--upgrade )?(?:torch|torchvision|xformers)\b(?!=)", note
            ), note


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.22.1", "CUDA graphs are part of what was set aside in the profiling run"),
        ("0.20.1", "CUDA graphs come on top of the ceiling.\n"),
        (None, "CUDA graphs come on top of the ceiling; since vLLM 0.21 they are estimated inside it."),
    ],
)
def test_where_graphs_are_counted_is_said_for_the_version(version: str | None, said: str) -> None:
    """Once both were said of every version: since 0.21 nobody has to leave room for graphs above the ceiling."""
    lines = (LOGS[0].parent / "healthy_vllm022_q4bfp8_3090.log").read_text().splitlines(keepends=True)
    kept = lines if version else [line for line in lines if "0.22.1" not in line]
    text = to_text(explain("".join(kept).replace("0.22.1", version or "")))
    assert said in text
    assert text.count("CUDA graphs come on top") + text.count("CUDA graphs are part of") == 1


def test_variables_are_not_called_flags() -> None:
    for path in LOGS:
        found = explain_file(path)
        flagged = [change.flag.startswith("-") for change in found.changes]
        text = to_text(found)
        assert ("\nEnvironment variables to set\n" in text) == (
            bool(flagged) and not any(flagged) and not found.command
        ), path
        assert ("\nFlags to change\n" in text) == (any(flagged) and not found.command), path
        for change in found.changes:
            assert f"{change.flag} {change.new}" not in text or change.flag.startswith("-"), path


def test_what_is_not_accounted_for_is_shown_only_where_it_shows() -> None:
    """Once "remains 0.00", which is nothing that anybody has to look for."""
    shown = 0
    for path in LOGS:
        found = explain_file(path)
        rest, text = found.budget.remainder_bytes, to_text(found)
        assert "\n  remains" not in text, path
        rows = re.findall(r"^  (?:not accounted for|more than there was) +(\d+\.\d\d)  computed$", text, re.M)
        assert all(row != "0.00" for row in rows), path
        assert bool(rows) == (rest is not None and abs(rest) / GIB >= 0.005), path
        shown += bool(rows)
    assert shown >= 5


def test_what_pytorch_does_not_tell_apart_has_a_row() -> None:
    """Of 15.98 GiB 0.20 were in no row, as AMD's message says nothing of this process."""
    found = explain_file(LOGS[0].parent / "thread_hip_full_6950xt.log")
    parts = {part.name: part for part in found.budget.uses}
    both = parts["context, libraries and other processes"]
    assert (round(both.nbytes / GIB, 2), both.origin) == (0.2, "computed")
    frame = {part.name: part.nbytes for part in found.budget.frame}
    assert sum(part.nbytes for part in parts.values()) == frame["total"] - frame["free at the failure"]
    assert re.search(r"context, libraries and other processes +0\.20  computed", to_text(found))
