"""Failures from public threads: each log names its thread, and gets its cause and a command, or its last word.

The lines are the threads' own, few of many, with users' names taken out; a last line without a logger's prefix is
mostly the title.
"""

# ruff: noqa: E501 - lines of logs

from pathlib import Path

import pytest

from snugvl.diagnose.explain import explain, explain_file
from snugvl.diagnose.result import to_text

LOGS = Path(__file__).parent / "logs"
BUILD_TOOLS = "sudo apt install build-essential python3-dev"
CUDA_HOME = "export CUDA_HOME=/usr/local/cuda"
FETCH = "hf download MODEL --force-download"
FRESH = "python3 -m venv ~/engine"

# log: (causes, what the diagnosis says: a command, a number of the log, or the last exception)
THREADS = {
    "bnb_binary": ("packages", "pip install -U bitsandbytes"),
    "bnb_cuda_setup": ("packages", "python -m bitsandbytes"),
    "context_beyond_model": ("settings", "--max-model-len 512"),
    "cublas_internal": ("exception", "CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"),
    "engine_dead_only": ("exception", "MQLLMEngine is already dead"),
    "flash_attn_missing": ("packages", "pip install flash-attn"),
    "flashinfer_ninja_cuda_home": ("compiler", CUDA_HOME),
    "flashinfer_no_nvcc": ("compiler", CUDA_HOME),
    "flashinfer_nvcc_option": ("compiler", "VLLM_USE_FLASHINFER_SAMPLER=0"),
    "flashinfer_sampler_nvcc": ("compiler", "VLLM_USE_FLASHINFER_SAMPLER=0"),
    "forked_cuda": ("forked_cuda", "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    "gcc_cuda_utils": ("compiler", BUILD_TOOLS),
    "heads_tensor_parallel": ("settings", "--tensor-parallel-size 4"),
    "hip_invalid_function": ("no_kernel", "HIP_VISIBLE_DEVICES"),
    "llamacpp_compute_280g": ("compute_buffer", "-ub 128"),
    "llamacpp_compute_while_serving": ("compute_buffer", "-ub 128"),
    "llamacpp_hub_500": ("exception", "std::runtime_error: error from HF API, response code: 500"),
    "llamacpp_kv_cpu": (
        "context",
        "128.00 GiB of host memory was refused: it is the KV cache for a context of 1,048,576",
    ),
    "llamacpp_kv_gpu": ("context", "-c 4096"),
    "llamacpp_pre_tokenizer": (
        "checkpoint",
        "(unknown pre-tokenizer type: 'deepseek-r1-qwen'): it is incomplete, or was made for another version",
    ),
    "llamacpp_projector": ("checkpoint", "names no type: it was made for another version"),
    "llamacpp_rocm_second_gpu": ("no_kernel", "HIP_VISIBLE_DEVICES=0"),
    "llamacpp_weights_145g": ("weights", "snugvl plan"),
    "lora_oom_v0": ("serving_memory", "Lower `--gpu-memory-utilization` by 0.05 from what it was"),
    "nccl_out_of_memory": ("out_of_memory", "snugvl plan"),
    "nccl_watchdog": ("communication", "NCCL_P2P_DISABLE=1"),
    "no_c_compiler": ("compiler", BUILD_TOOLS),
    "numba_numpy": ("packages", "pip install 'numpy<=2.2.99'"),
    "numpy_module": ("packages", FRESH),
    "ollama_architecture": ("architecture", "Update Ollama or llama.cpp"),
    "ollama_driver": ("driver", "Install a driver"),
    "ollama_file_magic": ("checkpoint", "ollama pull MODEL"),
    "ollama_mmproj": ("vision_weights", "--no-mmproj-offload"),
    "ollama_runner_oom": ("compute_buffer", "OLLAMA_CONTEXT_LENGTH=4096"),
    "ollama_tensors": ("checkpoint", FETCH),
    "param_shape_4bit": ("checkpoint", "[3096576, 1], the model's configuration asks for [5376, 1152]"),
    "ptxas_sm121": ("compiler", "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"),
    "ptxas_thor": (
        "compiler",
        "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas vllm serve nvidia/Qwen3-30B-A3B-FP4",
    ),
    "python_h_tp4": ("compiler", BUILD_TOOLS),
    "rocblas_tensile": ("no_kernel", "rocminfo"),
    "safetensors_header": ("checkpoint", FETCH),
    "safetensors_incomplete": ("checkpoint", FETCH),
    "served_then_illegal_access": (
        "exception",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    "served_then_oom": ("serving_memory", "Lower `--gpu-memory-utilization` by 0.05 from what it was"),
    "served_then_oom_graphs": (
        "serving_memory fragmentation",
        "Lower `--gpu-memory-utilization` by 0.05 from what it was",
    ),
    "size_mismatch_torch": ("checkpoint", "[4096, 4096], the model's configuration asks for [128, 4096]"),
    "triton_shared_memory": ("no_kernel", "66,560 bytes of shared memory in a block; this GPU has 65,536"),
    "undefined_symbol": ("packages", FRESH),
    "vllm_nvcc_not_found": ("compiler", CUDA_HOME),
    "weight_shape": ("checkpoint", "[3600], the model's configuration asks for [3584]"),
    "xformers_no_operator": ("no_kernel", "python -m xformers.info"),
    "accelerate_missing": ("packages", "python -m pip install accelerate"),
    "comfyui_allocation_on_device": ("out_of_memory", "The message alone does not say"),
    "cpu_allocator": ("host_memory", "System memory (RAM) ran out, not the GPU's: 151,781,376 bytes"),
    "cublas_alloc": ("out_of_memory", "no GPU memory for its workspace"),
    "disk_full_hub": ("disk_full", "export HF_HOME=FOLDER"),
    "disk_full_rust": ("disk_full", "df -h"),
    "docker_no_gpu_runtime": ("driver", "sudo nvidia-ctk runtime configure --runtime=docker"),
    "exit_137": ("host_killed", "dmesg | grep -i oom"),
    "hip_full_6950xt": ("out_of_memory fragmentation", "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"),
    "hip_more_than_the_gpu": (
        "out_of_memory",
        "16.00 GiB were asked for in one piece; the whole GPU has 15.24",
    ),
    "hip_vllm_strix_halo": ("out_of_memory", "own tensors take 99.37 GiB of 127.00 GiB"),
    "image_tokens_mismatch": ("exception", "Image features and image tokens do not match: tokens: 1991"),
    "jan_unknown_projector": ("architecture", "projector type gemma4uv; a newer one may"),
    "koboldcpp_mmproj": ("projector", "different widths, 3,584 and 5,120"),
    "libcudart_missing": ("packages", FRESH),
    "llamacpp_clip_tensor": ("checkpoint", "update the engine first"),
    "llamacpp_file_bounds": ("checkpoint", FETCH),
    "llamacpp_gguf_key": (
        "checkpoint",
        "(key not found in model: gemma3.attention.layer_norm_rms_epsilon): it is incomplete, or was made for",
    ),
    "llamacpp_libcxx_ggufv1": ("checkpoint", "convert the original again"),
    "llamacpp_libcxx_threads": (
        "exception",
        "std::__1::system_error: thread constructor failed: Resource temporarily unavailable",
    ),
    "llamacpp_magic_lfs": ("checkpoint", "git lfs pull"),
    "llamacpp_mmproj_n_embd": ("projector", "If it is that one, update llama.cpp"),
    "llamacpp_no_mmproj": ("projector", "--mmproj FILE"),
    "llamacpp_picture_10g": ("image_buffer", "--image-max-tokens 1024"),
    "llamacpp_picture_44g_ram": ("image_buffer", "43.62 GiB of host memory was refused for the picture"),
    "llamacpp_picture_warmup": ("image_buffer", "the picture that the start tries"),
    "llamacpp_retried_without_pipeline": ("", "no sign that the engine came up"),
    "llamacpp_sycl_memory": ("out_of_memory", "The message alone does not say"),
    "llamacpp_vulkan_2060": ("out_of_memory", "A buffer of 0.11 GiB was refused"),
    "metal_mlx_libcxx": ("out_of_memory", "The message alone does not say"),
    "metal_ollama": ("out_of_memory", "the lines do not say for which"),
    "mlx_internal_libcxx": (
        "exception",
        "std::runtime_error: [METAL] Command buffer execution failed: Internal",
    ),
    "mps_other_allocations": ("out_of_memory", "takes the limit away and lets macOS swap or freeze"),
    "ollama_mllama_assert": ("exception", "GGML_ASSERT(ggml_nelements(a) == ne0*ne1*ne2) failed"),
    "ollama_runner_eof": ("exception", "something failed, not why"),
    "preprocessor_missing": (
        "checkpoint",
        "hf download ORIGINAL preprocessor_config.json --local-dir FOLDER",
    ),
    "systemd_oom_kill": ("host_killed", "raise memory= in .wslconfig"),
    "torchvision_missing": ("packages", "python -m pip install --no-deps torchvision==0.M"),
    "vllm_kv_cache_allocation": ("out_of_memory", "while the KV cache was allocated"),
    "vllm_no_device": ("driver", "docker run --gpus all"),
    "vllm_tower_hip_7800xt": ("vision_profile", "in the vision encoder, which vLLM profiles"),
    "windows_paging_file": ("host_memory", "Let Windows manage the page file's size"),
    "world_size": ("settings", "world_size (2) is less than than max local gpu count (1)"),
    "xpu_4gb_block": ("out_of_memory", "at most 4 GB in one piece, and 6.85 GiB were asked for"),
    "xpu_a770": ("out_of_memory", "8.00 GiB were asked for on a GPU of 15.11 GiB"),
}


def test_every_thread_is_in_the_table_and_named() -> None:
    assert {path.stem.removeprefix("thread_") for path in LOGS.glob("thread_*.log")} == set(THREADS)
    assert len(THREADS) >= 90
    named = [(LOGS / f"thread_{name}.log").read_text(encoding="utf-8").split("\n", 1)[0] for name in THREADS]
    assert all(line.startswith("# thread: github.com/") for line in named)
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("name", sorted(THREADS))
def test_the_cause_and_what_to_do(name: str) -> None:
    found = explain_file(LOGS / f"thread_{name}.log")
    causes, said = THREADS[name]
    assert [cause.kind for cause in found.causes] == causes.split()
    assert all(cause.evidence for cause in found.causes)
    text = to_text(found)
    assert said in text
    assert ("No failure found" in text) == (not causes)


# Lines of threads that no rule was written from: (causes, what is said).
HELD_OUT = {
    "ollama/ollama/issues/1083": (
        "CUDA error 3 at /go/src/llama.cpp/gguf/ggml-cuda.cu:5661: initialization error\ncurrent device: 0\n2023/11/11 16:02:43 llama.go:438: error starting llama runner: llama runner process has terminated\n",
        "exception",
        "initialization error",
    ),
    "ollama/ollama/issues/9529": (
        "Error: llama runner process has terminated: error loading model: done_getting_tensors: wrong number of tensors; expected 724, got 723\n",
        "checkpoint",
        "update the engine",
    ),
    "sgl-project/sglang/issues/1117": (
        "/tmp/tmps1rkq3y3/main.c:5:10: fatal error: Python.h: No such file or directory\n    5 | #include <Python.h>\ncompilation terminated.\n\nException in run_tp_server:\nTraceback (most recent call last):\n",
        "compiler",
        BUILD_TOOLS,
    ),
    "ggml-org/llama.cpp/issues/1569": (
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  unexpectedly reached end of file\nAborted (core dumped)\n",
        "exception",
        "std::runtime_error: unexpectedly reached end of file",
    ),
    "vllm-project/vllm/issues/3676": (
        "ValueError: User-specified max_model_len (131072) is greater than the derived max_model_len (None=8192 in model's config.json). This may lead to incorrect model\n",
        "settings",
        "--max-model-len 8192",
    ),
    "vllm-project/vllm/issues/52435": (
        "AssertionError: n_physical_experts=256 must be divisible by ep_size=3. Adjust num_redundant_experts.\n",
        "exception",
        "n_physical_experts=256 must be divisible by ep_size=3",
    ),
    "ollama/ollama/issues/6860": (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144.00 MiB on device 4: cudaMalloc failed: out of memory\nggml_gallocr_reserve_n: failed to allocate CUDA4 buffer of size 150995968\nllama_new_context_with_model: failed to allocate compute buffers\n",
        "compute_buffer",
        "-ub 128",
    ),
    "vllm-project/vllm/issues/6976": (
        "│ ERROR 09-27 06:46:46 engine.py:157] RuntimeError: CUDA error: an illegal memory access was encountered\n",
        "exception",
        "RuntimeError: CUDA error: an illegal memory access",
    ),
}


@pytest.mark.parametrize("thread", sorted(HELD_OUT))
def test_a_failure_that_was_not_looked_at_is_explained_or_quoted(thread: str) -> None:
    log, causes, said = HELD_OUT[thread]
    found = explain(log)
    assert [cause.kind for cause in found.causes] == causes.split()
    assert said in to_text(found)


KV_LIKE_WEIGHTS = """\
llama_context: n_ctx         = 65536
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 9663676416
llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
"""
VISION_LIKE_WEIGHTS = """\
load_tensors: offloaded 29/29 layers to GPU
clip_ctx: CLIP using CUDA0 backend
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1289.95 MiB on device 0: cudaMalloc failed: out of memory
alloc_tensor_range: failed to allocate CUDA0 buffer of size 1352605696
"""


def test_the_kv_cache_and_the_vision_encoder_are_no_weights_of_the_model() -> None:
    """llama.cpp refuses all three in the same words; what it was about to load tells them apart."""
    assert [cause.kind for cause in explain(KV_LIKE_WEIGHTS).causes] == ["context"]
    assert [cause.kind for cause in explain(VISION_LIKE_WEIGHTS).causes] == ["vision_weights"]


ANSWERED = """\
INFO:     Application startup complete.
(EngineCore pid=1) Capturing CUDA graphs (decode, FULL): 100%
INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK
(EngineCore pid=1) ERROR 05-05 12:36:59 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def test_graphs_are_not_to_blame_once_a_request_was_answered() -> None:
    assert [cause.kind for cause in explain(ANSWERED).causes] == ["serving_memory"]
    before = ANSWERED.replace(" 200 OK", " 503")
    assert [cause.kind for cause in explain(before).causes] == ["cuda_graphs"]


CHAINED = """\
(EngineCore pid=9) Traceback (most recent call last):
(EngineCore pid=9) frobnicate.LatticeError: the third pole is missing
(EngineCore pid=9)
(EngineCore pid=9) The above exception was the direct cause of the following exception:
(EngineCore pid=9)
(EngineCore pid=9) Traceback (most recent call last):
(EngineCore pid=9) ValueError: could not set up the lattice
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_innermost_cause_is_quoted() -> None:
    (cause,) = explain(CHAINED).causes
    assert (cause.kind, cause.explanation) == (
        "exception",
        "The log says: frobnicate.LatticeError: the third pole is missing",
    )
    assert [evidence.line for evidence in cause.evidence] == [2]
    apart = CHAINED.replace("was the direct cause of", "and")
    assert "could not set up the lattice" in explain(apart).causes[0].explanation


def test_an_exception_that_a_start_survived_is_no_failure() -> None:
    log = "ImportError: cannot import name 'x'\nINFO:     Application startup complete.\n"
    assert explain(log).healthy
    after = explain(log + "ValueError: the lattice broke\n")
    assert not after.healthy
    assert "the lattice broke" in after.causes[0].explanation


def test_only_what_says_nothing_itself_is_quoted_as_such() -> None:
    log = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert "Engine core initialization failed" in explain(log).causes[0].explanation


def test_a_file_without_a_name_is_no_model_called_n_a() -> None:
    name = "llm_load_print_meta: general.name     = n/a\n"
    text = to_text(explain(name + (LOGS / "thread_llamacpp_file_bounds.log").read_text()))
    assert FETCH in text
    assert "n/a" not in text
