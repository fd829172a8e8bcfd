"""The lines that mean something: a literal to find fast, and a pattern that takes the numbers out.

A block of the log is searched for the literals first (C speed); a pattern runs only on a line that holds its
literal. Every repetition is bounded or over one character class, so no line makes a pattern slow.
Sources: vLLM 0.33 and its older releases, PyTorch's allocator, transformers and accelerate, llama.cpp, Ollama,
the kernel's messages, as quoted in public issues.
"""

# ruff: noqa: E501, S108 - one pattern or one whole sentence a line reads better than a wrapped one

import re
from dataclasses import dataclass
from typing import Final

from snugvl.diagnose.result import Engine


@dataclass(frozen=True, slots=True)
class Pattern:
    """`engine`: whose line it is. `fails`: a run with this line failed, or a request of it did."""

    key: str
    needle: bytes
    regex: re.Pattern[str]
    engine: Engine | None = None
    fails: bool = False


_SIZE = r"(-?[\d.]{1,20}) ?(bytes|[KMGT]i?B|B)"


def _p(key: str, needle: str, regex: str = "", engine: Engine | None = None, fails: bool = False) -> Pattern:
    return Pattern(key, needle.encode(), re.compile(regex or re.escape(needle)), engine, fails)


def _vllm(key: str, needle: str, regex: str = "", fails: bool = False) -> Pattern:
    return _p(key, needle, regex, "vllm", fails)


VLLM_FACTS: Final = (
    _p("command", "vllm serve", r"(?:^|[$#>|`'\" ])((?:\w{1,60}=\S{1,200} +){0,20}(?:\S{0,200}/)?vllm serve +(?![\[:({]).*)"),
    _p("command", "vllm.entrypoints.openai.api_server", r"((?:\w{1,60}=\S{1,200} +){0,20}\S{0,200}python[\d.]{0,5} +-m +vllm\.entrypoints\.openai\.api_server +-.*)"),
    _p("command", "vllm/vllm-openai", r"(docker run .*vllm/vllm-openai(?:[:@]\S{1,120})? +.*)"),
    _vllm("version", "vLLM API server version", r"vLLM API server version v?(\d\S{0,40})"),
    _vllm("version_line", "vLLM Version", r"vLLM Version *: v?(\d\S{0,40})"),
    _vllm("args", "non-default args: ", r"non-default args: (\{.*)"),
    _vllm("namespace", "args: Namespace(", r"args: Namespace\((.*)"),
    _vllm("engine", "LLM engine (v", r"LLM engine \(v?([^)\s]{1,60})\) with config: ?(.*)"),
    _vllm("loading", "Starting to load model", r"Starting to load model ([^\s]{1,300}?)\.{0,3}(?:\s|$)"),
    _vllm("weights", "odel loading took", r"[Mm]odel loading took ([\d.]{1,12}) (GiB|GB)"),
    _vllm("weights", "Loading model weights took", r"Loading model weights took ([\d.]{1,12}) (GB|GiB)"),
    _vllm("v0_ceiling", "the current vLLM instance can use", r"total_gpu_memory \(([\d.]{1,12})GiB\) x gpu_memory_utilization \(([\d.]{1,8})\) = ([\d.]{1,12})GiB"),
    _vllm("v0_parts", "model weights take ", r"model weights take ([\d.]{1,12}) ?GiB; non_torch_memory takes (-?[\d.]{1,12}) ?GiB; PyTorch activation peak memory takes (-?[\d.]{1,12}) ?GiB; the rest of the memory reserved for KV Cache is (-?[\d.]{1,12}) ?GiB"),
    _vllm("kv", "KV cache memory: ", r"Available KV cache memory: (-?[\d.]{1,12}) GiB"),
    _vllm("kv_tokens", "GPU KV cache size: ", r"GPU KV cache size: ([\d,]{1,20}) tokens"),
    _vllm("concurrency", "Maximum concurrency for ", r"Maximum concurrency for ([\d,]{1,20}) tokens per request: ([\d.]{1,12})x"),
    _vllm("gpu_blocks", " blocks: ", r"# (?:GPU|cuda) blocks: (\d{1,12})"),
    _vllm("encoder", "Encoder cache will be initialized", r"budget of ([\d,]{1,12}) tokens,? and profiled with (\d{1,6}) (\w{1,30}) items"),
    _vllm("autofit", "Auto-fit max_model_len: reduced", r"reduced from (\d{1,12}) to (\d{1,12})"),
    _vllm("graphs", "raph capturing finished in", r"finished in [\d.]{1,12} secs?, took (-?[\d.]{1,12}) GiB"),
    _vllm("graphs_estimated", "Estimated CUDA graph memory", r"Estimated CUDA graph memory: (-?[\d.]{1,12}) GiB"),
    _vllm("capturing", "Capturing CUDA graph", r"Capturing CUDA graph"),
    _vllm("utilisation", "The current --gpu-memory-utilization=", r"The current --gpu-memory-utilization=([\d.]{1,10})"),
    _vllm("summary", "Actual usage is", r"Free memory on device (?:cuda:\d{1,3} )?\(([\d.]{1,12})/([\d.]{1,12}) GiB\) on startup\. Desired GPU memory utilization is \(([\d.]{1,10}), ([\d.]{1,12}) GiB\)\. Actual usage is ([\d.]{1,12}) GiB for [^,]{1,60}, ([\d.]{1,12}) GiB for peak activation(?:, [\d.]{1,12} GiB for non-torch memory)?,? and (-?[\d.]{1,12}) GiB for CUDAGraph memory"),
    _vllm("up", "init engine (profile, create kv cache, warmup model) took"),
    _vllm("core", "EngineCore", r"(?:EngineCore|Engine core)"),
    _vllm("v1_runner", "gpu_model_runner.py"),
    _p("serving", "Application startup complete"),
    _vllm("dequantised", "does not have native support for FP8 computation"),
)  # fmt: skip
VLLM_FAILURES: Final = (
    _vllm("no_blocks", "No available memory for the cache blocks", fails=True),
    _vllm("kv_short", "To serve at least one request with the model", r"max seq len \((\d{1,12})\), ?\(([\d.]{1,12}) ?GiB KV cache is needed, which is larger than the available KV cache memory \((-?[\d.]{1,12}) ?GiB\)(?:\. Based on the available memory,? the estimated maximum model length is (\d{1,12}))?", fails=True),
    _vllm("kv_short_tokens", "is larger than the maximum number of tokens", r"max seq len \((\d{1,12})\) is larger than the maximum number of tokens that can be stored in KV cache \((\d{1,12})\)", fails=True),
    _vllm("autofit_failed", "Cannot auto-fit max_model_len", fails=True),
    _vllm("over_free", "is less than desired GPU memory utilization", r"Free memory on device (?:\w{1,10}:\d{1,3} )?\(([\d.]{1,12})/([\d.]{1,12}) GiB\) on startup is less than desired GPU memory utilization \(([\d.]{1,10}), ([\d.]{1,12}) GiB\)", fails=True),
    _vllm("disturbed", "Error in memory profiling", r"Initial free memory ([\d.]{1,20})( GiB)?, current free memory ([\d.]{1,20})", fails=True),
    _vllm("encoder_small", "exceeds the pre-allocated encoder cache size", r"(\w{1,20}) item with (?:length )?(\d{1,12})(?: embedding tokens)?, which exceeds the pre-allocated encoder cache size (\d{1,12})", fails=True),
    _vllm("prompt_long", "longer than the maximum model length of", r"\(length (?P<length>\d{1,12})\)[^.]{0,90}longer than the maximum model length of (?P<limit>\d{1,12})", fails=True),
    _vllm("prompt_long", "maximum context length is", r"maximum context length is (?P<limit>\d{1,12}) tokens\. However, (?:you requested|your request has|your prompt contains) (?:at least )?(?P<length>\d{1,12})", fails=True),
    _vllm("images", "may be provided in one", r"At most (\d{1,6}) (\w{1,20})\(s\) may be provided in one (?:prompt|request)", fails=True),
    _vllm("load_failed", "Failed to load model - not enough GPU memory", fails=True),
    _vllm("sampler", "CUDA out of memory occurred when warming up sampler", r"warming up sampler with (\d{1,6}) dummy requests", fails=True),
    _vllm("uva", "UVA is not available", fails=True),
    _vllm("pin_fallback", "Pinned memory is not available on this platform"),
    _vllm("method", "The quantization method", r"The quantization method (\w{1,40}) is not supported for the current GPU\. Minimum capability: (\d{1,4})\. Current capability: (\d{1,4})", fails=True),
    _vllm("bad_keyword", "unexpected keyword argument", r"Args[\w.]{0,20}(?:__init__|__new__)?\(\) got an unexpected keyword argument '(\w{1,80})'", fails=True),
    _p("bad_flags", "unrecognized arguments:", r"error: unrecognized arguments: (.*)", fails=True),
    _vllm("bad_env", "Unknown vLLM environment variable", r"Unknown vLLM environment variable detected: (\w{1,80})"),
    _vllm("deprecated_flag", "[DEPRECATED] Block manager v1 has been removed", r"(--use-v2-block-manager)"),
    _p("env_v1", "VLLM_USE_V1=0"),
    _vllm("start_failed", "EngineCore failed to start", fails=True),
    _vllm("core_failed", "Engine core initialization failed", fails=True),
    _vllm("core_died", "EngineDeadError", fails=True),
    _vllm("refused", " [type=", r"^(?:\([^)]{1,80}\) )? {2}(\S.{0,400}?) \[type=\w{1,40}, input_value=", fails=True),
    _vllm("refused", "must be divisible by tensor parallel size", r"(Total number of attention heads \((?P<heads>\d{1,4})\) must be divisible by tensor parallel size \((?P<ranks>\d{1,4})\))", fails=True),
    _vllm("refused", "is greater than the derived max_model_len", r"(User-specified max_model_len \(\d{1,12}\) is greater than the derived max_model_len \(\w{1,60}=(?P<derived>\d{1,12})[^)]{0,120}\))", fails=True),
    _p("served", '" 200', r'"(?:POST|GET) /\S{1,80} HTTP/1\.\d" 200'),
    _vllm("stepping", "_process_engine_step"),
    _vllm("stepping", "Dumping scheduler output for model execution"),
    _vllm("stepping", "EngineCore encountered a fatal error"),
    _vllm("stepping", "AsyncLLM output_handler failed"),
    _vllm("stepping", "Engine loop is not running"),
    _vllm("sampling_kernels", "topk_topp_sampler.py"),
    _vllm("sampling_kernels", "_dummy_sampler_run"),
    _vllm("arch_vllm", "are not supported for now", r"Model architectures \[([^\]]{0,200})\] are not supported for now", fails=True),
)  # fmt: skip
TORCH: Final = (
    _p("oom", "CUDA out of memory. Tried to allocate", rf"CUDA out of memory\. Tried to allocate {_SIZE}", "pytorch", True),
    _p("oom_new", " has a total capa", rf"GPU (\d{{1,3}}) has a total capac(?:i)?ty of {_SIZE} of which {_SIZE} is free", "pytorch"),
    _p("oom_process", "this process has ", rf"this process has {_SIZE} memory in use", "pytorch"),
    _p("oom_parts", "is reserved by PyTorch but unallocated", rf"Of the allocated memory {_SIZE} is allocated by PyTorch(?:, with {_SIZE} allocated in private pools(?: \([^)]{{0,40}}\))?)?,? and {_SIZE} is reserved by PyTorch but unallocated", "pytorch"),
    _p("oom_old", " GiB total capacity; ", rf"\(GPU (\d{{1,3}}); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; {_SIZE} (?:reserved in total by PyTorch|cached)", "pytorch"),
    _p("oom_others", " memory in use. ", rf"Process (\d{{1,9}}) has {_SIZE} memory in use", "pytorch"),
    _p("oom_pools", "allocated in private pools", "allocated in private pools", "pytorch"),
    _p("oom_bare", "CUDA error: out of memory", "", None, True),
    _p("kernel_image", "no kernel image is available for execution on the device", "", "pytorch", True),
    _p("sm_unsupported", "is not compatible with the current PyTorch installation", r"(?:^|\s)(.{0,80}?) with CUDA capability (sm_\d{1,4}) is not compatible", "pytorch", True),
    _p("driver_old", "The NVIDIA driver on your system is too old", r"too old \(found version (\d{1,8})\)", "pytorch", True),
    _p("driver_old", "CUDA driver version is insufficient for CUDA runtime version", "", None, True),
    _p("driver_mismatch", "unsupported display driver / cuda driver combination", "", None, True),
    _p("driver_mismatch", "Driver/library version mismatch", "", None, True),
    _p("driver_none", "Found no NVIDIA driver on your system", "", "pytorch", True),
    _p("driver_none", "Failed to infer device type", "", "vllm", True),
    _p("driver_none", "libcuda.so.1: cannot open shared object file", "", None, True),
    _p("driver_none", "Torch not compiled with CUDA enabled", "", "pytorch", True),
    _p("ptx", "the provided PTX was compiled with an unsupported toolchain", "", None, True),
    _p("bf16", "Bfloat16 is only supported on GPUs with compute capability", r"Bfloat16 is only supported on GPUs with compute capability of at least ([\d.]{1,5})\. Your (.{1,60}?) GPU has compute capability ([\d.]{1,5})", None, True),
    _p("fp8e4nv", "type fp8e4nv not supported in this architecture", "", None, True),
    _p("scaled_mm", "torch._scaled_mm is only supported on CUDA devices with compute capability", "", "pytorch", True),
    _p("fp8_hf", "FP8 quantized models is only supported on GPUs with compute capability", r"actual = `?([\d.]{1,6})", "transformers", True),
    _p("fp8_dequantised", "default to dequantizing the model to bf16", "", "transformers"),
    _p("dispatch", "modules are dispatched on the CPU or the disk", "", "transformers", True),
    _p("meta_cpu", "on the meta device because they were offloaded to the", r"offloaded to the ([\w ]{1,20})", "transformers"),
    _p("bnb_cpu", "bitsandbytes was compiled without GPU support", "", "transformers", True),
    _p("arch_hf", "Transformers does not recognize this architecture", r"model type `?([\w.-]{1,60})`? but Transformers does not", "transformers", True),
    _p("from_pretrained", "Loading checkpoint shards", r"Loading checkpoint shards", "transformers"),
)  # fmt: skip
SOFTWARE: Final = (
    _p("no_compiler", "Failed to find C compiler", "", None, True),
    _p("python_h", "Python.h", r"Python\.h: No such file|include file 'Python\.h' not found", None, True),
    _p("cc_failed", "returned non-zero exit status", r"Command '\['?[^', ]{0,200}?\b(gcc|g\+\+|cc|clang)'", None, True),
    _p("no_nvcc", "nvcc", r"Could not find nvcc|nvcc: (?:command )?not found|No such file or directory: '?[^' ]{0,200}nvcc\b", None, True),
    _p("nvcc_failed", "nvcc fatal", r"nvcc fatal *: (.{1,300})", None, True),
    _p("ninja", "ninja: build stopped", "", None, True),
    _p("ninja", "Ninja build failed", "", None, True),
    _p("ptxas", "ptxas fatal", r"ptxas fatal *: Value '(sm_\w{1,10})' is not defined", None, True),
    _p("amd_kernel", "rror: invalid device function", r"(HIP|ROCm) error: invalid device function", None, True),
    _p("amd_kernel", "TensileLibrary.dat", r"Cannot read \S.{0,200}TensileLibrary\.dat(?:.{0,80}GPU arch : (gfx\w{1,10}))?", None, True),
    _p("device_function", "CUDA error: invalid device function", "", None, True),
    _p("xformers", "No operator found for `memory_efficient_attention_forward`", "", None, True),
    _p("triton_shared", "out of resource: shared memory", r"Required: (\d{1,12}), Hardware limit: (\d{1,12})", None, True),
    _p("weight_shape", " to load weight", r"(?:Attempted|Tried) to load weights? (?:of size )?\(?torch\.Size\((\[[\d, ]{0,60}\])\).{1,40}torch\.Size\((\[[\d, ]{0,60}\])\)", None, True),
    _p("weight_shape", "size mismatch for ", r"size mismatch for \S{1,200}: .{0,40}torch\.Size\((\[[\d, ]{0,60}\])\).{1,80}torch\.Size\((\[[\d, ]{0,60}\])\)", None, True),
    _p("damaged", "Error while deserializing header", r"Error while deserializing header: (\w{1,60})", None, True),
    _p("damaged", "wrong number of tensors", r"wrong number of tensors; expected (\d{1,9}), got (\d{1,9})", None, True),
    _p("damaged", "invalid file magic", "", None, True),
    _p("damaged", "unable to find tensor ", "", None, True),
    _p("damaged", "tensor '", r"tensor '\S{1,200}' (?:not found|has wrong shape)", None, True),
    _p("symbol", "undefined symbol: ", r"(\S{1,300}\.so[\w.]{0,20}): undefined symbol: \S{1,300}", None, True),
    _p("no_module", "ModuleNotFoundError: No module named", r"No module named '([\w.]{1,120})'", None, True),
    _p("numba", "Numba needs NumPy", r"Numba needs NumPy ([\d.]{1,10}?) or less\. Got NumPy ([\d.]{1,10}\d)", None, True),
    _p("flash_attn", "FlashAttention2 has been toggled on", "", "transformers", True),
    _p("bnb", "CUDA Setup failed despite GPU being available", "", "transformers", True),
    _p("bnb", "Could not find the bitsandbytes CUDA binary", "", "transformers", True),
    _p("nccl_memory", "Cuda failure 'out of memory'", "", None, True),
    _p("nccl", "NCCL error", r"NCCL error", None, True),
    _p("nccl", "NCCL watchdog thread terminated", "", None, True),
    _p("forked", "Cannot re-initialize CUDA in forked subprocess", "", None, True),
)  # fmt: skip
# Whatever else ends a process: exceptions of Python and C++, errors of compilers and of engines, and, last of
# all, a word that it is dead. Lines are read without the processes, times and files that loggers put first.
_LEAD = (
    r"^(?:\([^)]{1,80}\) ?|\[rank\d{1,4}\]: ?|[\w.-]{1,60} +\| |[|│>] ?|(?:ERROR|CRITICAL|FATAL):? +|\d\d-\d\d [\d:.]{5,15} "
    r"|\d{4}-\d\d-\d\d[T ][\d:.,+Z-]{5,30} |\[[\w.]{1,60}:\d{1,6}\] ?|[\w.]{1,60}:\d{1,6}\] ?){0,8}"
)
_RAISED = rf"{_LEAD}((?:[A-Za-z_]\w{{0,60}}\.){{0,8}}[A-Z]\w{{0,60}}(?:Error|Exception|OutOfResources)(?:: .{{0,2000}})?:?)$"
UNKNOWN: Final = (
    _p("raised", "Error", _RAISED),
    _p("raised", "Exception", _RAISED),
    _p("raised", "OutOfResources", _RAISED),
    _p("cxx_type", "terminate called after throwing", r"an instance of '([^']{1,120})'"),
    _p("raised", "what():", r"^(?:.{0,120}\s)?what\(\): +(.{1,1000})"),
    _p("error_line", "rror: ", rf"{_LEAD}((?:\S{{1,200}}: ){{0,4}}(?:\w{{1,20}} ){{0,2}}[Ee]rror: .{{1,1000}})$"),
    _p("error_line", "rror loading model: ", r"(error loading model: .{1,500})"),
    _p("error_line", "fatal", rf"{_LEAD}(\w{{1,20}} fatal *: .{{1,500}})"),
    _p("error_line", "failed with error", rf"{_LEAD}(.{{0,80}}failed with error .{{1,1000}})"),
    _p("died", "is already dead", rf"{_LEAD}(.{{1,60}} is already dead.{{0,100}})"),
    _p("died", "core dumped", r"(.{0,60}core dumped.{0,20})"),
    _p("died", "Segmentation fault", r"(.{0,60}Segmentation fault.{0,60})"),
    _p("died", "died unexpectedly", rf"{_LEAD}(.{{0,80}}died unexpectedly.{{0,80}})"),
    _p("trouble", "CUDA error", rf"{_LEAD}(CUDA error .{{1,300}})"),
    _p("trouble", "failed to ", rf"{_LEAD}((?:\S{{1,200}}: ){{0,4}}failed to .{{1,500}})"),
    _p("trouble", "t allocate", r"(.{0,120}can't allocate .{1,200})"),
    _p("direct_cause", "was the direct cause of the following exception"),
)  # fmt: skip
HOST: Final = (
    _p("gated", "You are trying to access a gated repo", "", None, True),
    _p("gated", "GatedRepoError", "", None, True),
    _p("gated", "is restricted and you are not in the authorized list", "", None, True),
    _p("missing_model", "is not a local folder and is not a valid model identifier", r"(\S{1,200}) is not a local folder", None, True),
    _p("missing_model", "RepositoryNotFoundError", "", None, True),
    _p("missing_model", "Repository Not Found for url", "", None, True),
    _p("hub_offline", "LocalEntryNotFoundError", "", None, True),
    _p("hub_offline", "We couldn't connect to ", "", None, True),
    _p("port", "address already in use", r"(?:address \('?[^)]{1,60}\)|).{0,20}address already in use", None, True),
    _p("port", "Address already in use", "", None, True),
    _p("killed", "Out of memory: Killed process", r"Killed process (\d{1,9}) \(([^)]{1,40})\)(?:.{0,200}anon-rss:(\d{1,15})kB)?", None, True),
    _p("killed", "OOMKilled", "", None, True),
    _p("killed_bare", "Killed", r"^(?:[\w.-]{1,40}: line \d{1,5}: +\d{1,9} )?Killed(?:\s|$)", None, True),
    _p("killed", "Signals.SIGKILL", "", None, True),
    _p("killed", "exitcode: -9", "", None, True),
    _p("shm", "o space left on device", r"/dev/shm\S{0,100}.{0,40}|.{0,120}/dev/shm", None, True),
    _p("shm", "insufficient shared memory (shm)", "", None, True),
    _p("shm", "Error while creating shared memory segment", "", None, True),
    _p("shm", "unable to open shared memory object", "", None, True),
    _p("shm", "unable to allocate shared memory(shm)", "", None, True),
    _p("bus_error", "Bus error", r"Bus error", None, True),
    _p("wsl", "WSL is detected"),
    _p("wsl", "microsoft-standard-WSL2"),
    _p("wsl", "/usr/lib/wsl/"),
    _p("wsl", "/dev/dxg"),
    _p("wsl", "WSL2"),
    _p("resident", "dxgkio_make_resident", r"dxgkio_make_resident: Ioctl failed: (-\d{1,4})", None, True),
    _p("dxg", "dxgk: dxgkio_query_adapter_info", r"Ioctl failed: (-\d{1,4})"),
    _p("smi_missing", "nvidia-smi", r"nvidia-smi: (?:command )?not found|No such file or directory: '?nvidia-smi", None, True),
    _p("nvml", "Failed to initialize NVML", "", None, True),
    _p("shared_gpu", "hared GPU memory", r"[Ss]hared GPU memory[^.\d]{0,40}([\d.]{1,10}) ?(GB|GiB)"),
    _p("smi_row", "MiB / ", r"(\d{1,7})MiB */ *(\d{1,7})MiB"),
    _p("gpu", "NVIDIA ", r"NVIDIA ((?:GeForce )?(?:RTX|GTX) ?(?:PRO |A)?\d{3,5}(?: Ti)?(?: SUPER)?(?: D)?(?: Laptop GPU)?|A100\S{0,20}|H100\S{0,20}|H200|L4\b|L40S?)"),
    _p("gpu", "Tesla T4", r"(Tesla T4)"),
)  # fmt: skip
LLAMA: Final = (
    _p("cuda_malloc", "cudaMalloc failed: out of memory", r"allocating ([\d.]{1,20}) MiB on device (\d{1,3}): cudaMalloc failed", "llama.cpp", True),
    _p("gallocr", "ggml_gallocr_reserve_n", r"failed to allocate (\w{1,30}) buffer of size (\d{1,20})", "llama.cpp", True),
    _p("alloc_range", "alloc_tensor_range: failed to allocate", r"failed to allocate (\w{1,30}) buffer of size (\d{1,20})", "llama.cpp", True),
    _p("vk_oom", "ErrorOutOfDeviceMemory", "", "llama.cpp", True),
    _p("kv_failed", "failed to allocate buffer for kv cache", "", "llama.cpp", True),
    _p("compute_failed", "failed to allocate compute buffers", "", "llama.cpp", True),
    _p("cpu_buffer", "ggml_backend_cpu_buffer_type_alloc_buffer", r"failed to allocate buffer of size (\d{1,20})", "llama.cpp", True),
    _p("assert_buffer", "GGML_ASSERT(buffer) failed", "", "llama.cpp", True),
    _p("arch_gguf", "unknown model architecture:", r"unknown model architecture: '([\w.-]{1,60})'", "llama.cpp", True),
    _p("arch_gguf", "unknown projector type:", r"unknown projector type: ?(\S{0,60})", "llama.cpp", True),
    _p("clip_start", "CLIP using ", r"CLIP using (\w{1,20}) backend", "llama.cpp"),
    _p("ggml_assert", "GGML_ASSERT(", r"(\S{1,120}): GGML_ASSERT\((.{1,120})\)", "llama.cpp", True),
    _p("clip_failed", "failed to load clip model", r"[Ff]ailed to load (?:clip|CLIP) model", "llama.cpp", True),
    _p("clip_failed", "ailed to load CLIP model", "", "llama.cpp", True),
    _p("clip", "clip_model_loader:", r"clip_model_loader: model size: +([\d.]{1,12}) MiB", "llama.cpp"),
    _p("clip_compute", "alloc_compute_meta", r"alloc_compute_meta: +(\w{1,20}) compute buffer size = +([\d.]{1,12}) MiB", "llama.cpp"),
    _p("clip_encode", "encoding image", r"encoding image(?: slice)?", "llama.cpp"),
    _p("clip_image", "image/slice", r"image_tokens->nx = (\d{1,6})", "llama.cpp"),
    _p("gguf_weights", "model buffer size", r"(CUDA\d|Vulkan\d|Metal|ROCm\d) model buffer size = +([\d.]{1,12}) MiB", "llama.cpp"),
    _p("gguf_kv", "KV buffer size", r"(CUDA\d|Vulkan\d|ROCm\d) KV buffer size = +([\d.]{1,12}) MiB", "llama.cpp"),
    _p("gguf_compute", "compute buffer size", r"(?:sched_reserve|llama_context|graph_reserve|llama_new_context_with_model): +(CUDA\d|Vulkan\d|ROCm\d) compute buffer size = +([\d.]{1,12}) MiB", "llama.cpp"),
    _p("gguf_free", "MiB free", r"using device (\w{1,12}) \((.{1,80}?)\).{0,40} - (\d{1,9}) MiB free", "llama.cpp"),
    _p("offloaded", "layers to GPU", r"offloaded (\d{1,4})/(\d{1,4}) layers to GPU", "llama.cpp"),
    _p("n_ctx", "n_ctx", r"\bn_ctx +(?:= +|\()(\d{1,9})", "llama.cpp"),
    _p("gguf_name", "general.name", r"general\.name +(?:str +)?= (.{1,80})$", "llama.cpp"),
    _p("gguf_build", "build: ", r"build: (\d{3,6}) \(", "llama.cpp"),
    _p("fit_failed", "failed to fit params to free device memory", "", "llama.cpp"),
    _p("ctx_exceeded", "exceeds the available context size", r"\((?P<length>\d{1,9}) tokens\) exceeds the available context size \((?P<limit>\d{1,9}) tokens\)", "llama.cpp", True),
    _p("listening", "server is listening on", "", "llama.cpp"),
    _p("ollama", "msg=\"inference compute\"", r'name="?(?:NVIDIA )?([^"=]{1,60}?)"? .{0,200}total="([\d.]{1,10}) GiB" available="([\d.]{1,10}) GiB"', "ollama"),
    _p("ollama_offload", "memory.required.full", r'layers\.model=(\d{1,4}) layers\.offload=(\d{1,4}) .{0,60}memory\.available="\[([\d.]{1,10}) GiB\]".{0,200}memory\.required\.full="([\d.]{1,10}) GiB"', "ollama"),
    _p("ollama_none", "insufficient VRAM to load any model layers", "", "ollama"),
    _p("ollama_host", "model requires more system memory", r"model requires more system memory \(([\d.]{1,10}) GiB\) than is available \(([\d.]{1,10}) GiB\)", "ollama", True),
    _p("ollama_died", "llama runner process has terminated", r"llama runner process has terminated", "ollama", True),
    _p("ollama_cut", "truncating input prompt", r"limit=(?P<limit>\d{1,9}) prompt=(?P<length>\d{1,9})", "ollama"),
    _p("ollama_line", "source=server.go", "", "ollama"),
    _p("ollama_version", "Listening on ", r"Listening on \S{1,60} \(version ([\w.-]{1,30})\)", "ollama"),
)  # fmt: skip
PATTERNS: Final = VLLM_FACTS + VLLM_FAILURES + TORCH + SOFTWARE + HOST + LLAMA + UNKNOWN
