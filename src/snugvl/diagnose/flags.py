"""vLLM's flags: those of 0.33 that matter here, and those that are gone or never were."""

# ruff: noqa: E501 - one pattern or one whole sentence a line reads better than a wrapped one

import difflib
from collections.abc import Mapping
from typing import Final

KNOWN: Final = frozenset({
    "--gpu-memory-utilization", "--device-memory-utilization", "--kv-cache-memory-bytes", "--max-model-len",
    "--max-num-seqs", "--max-num-batched-tokens", "--enforce-eager", "--cudagraph-capture-sizes",
    "--max-cudagraph-capture-size", "--performance-mode", "--block-size", "--num-gpu-blocks-override",
    "--enable-prefix-caching", "--kv-cache-dtype", "--kv-cache-dtype-skip-layers", "--limit-mm-per-prompt",
    "--language-model-only", "--skip-mm-profiling", "--mm-processor-kwargs", "--mm-processor-cache-gb",
    "--mm-encoder-attn-backend", "--mm-encoder-attn-dtype", "--video-pruning-rate", "--media-io-kwargs",
    "--disable-chunked-mm-input", "--cpu-offload-gb", "--cpu-offload-params", "--offload-backend",
    "--offload-group-size", "--kv-offloading-size", "--kv-offloading-backend", "--quantization",
    "--quantization-config", "--load-format", "--enable-sleep-mode", "--tensor-parallel-size",
    "--pipeline-parallel-size", "--data-parallel-size", "--trust-remote-code", "--served-model-name", "--port",
    "--host", "--dtype", "--api-key", "--hf-overrides", "--reasoning-parser", "--tool-call-parser",
    "--enable-auto-tool-choice", "--allowed-local-media-path", "--allowed-media-domains", "--revision",
})  # fmt: skip
REMOVED: Final[Mapping[str, str]] = {
    "--disable-v1-engine": "never existed; there is one engine (V1) since 0.11 and nothing to disable.",
    "--disable-v1": "never existed; there is one engine (V1) since 0.11 and nothing to disable.",
    "VLLM_USE_V1": "the V0 engine is gone, so it has no effect; leave it out. VLLM_USE_V2_MODEL_RUNNER=0 chooses the older model runner, which is another matter.",
    "--swap-space": "gone since 0.18; V1 never swapped KV to the host. For a KV tier in RAM use --kv-offloading-size.",
    "--use-v2-block-manager": "without effect since 0.6.4 and gone since; leave it out.",
    "--num-scheduler-steps": "V0 only, gone; leave it out.",
    "--enable-reasoning": "gone since 0.10; --reasoning-parser alone is enough.",
    "--preemption-mode": "V0 only, gone; V1 always recomputes.",
    "--worker-use-ray": "gone; use --distributed-executor-backend ray.",
    "--engine-use-ray": "V0 only, gone; leave it out.",
    "--device": "gone; vLLM is built for one kind of device.",
    "--max-seq-len-to-capture": "V0 only; V1 captures batch sizes: --max-cudagraph-capture-size.",
    "--guided-decoding-backend": "gone; it is part of --structured-outputs-config.",
    "--speculative-model": "V0 only; use --speculative-config.",
    "--num-lookahead-slots": "V0 only, gone; leave it out.",
    "--scheduler-delay-factor": "V0 only, gone; leave it out.",
    "--disable-mm-preprocessor-cache": "gone; use --mm-processor-cache-gb 0.",
}


def removed(name: str) -> str:
    """What became of a flag or variable, or "" if nothing is known of it."""
    return REMOVED.get(name, "")


def meant(flag: str) -> str:
    """The flag that a misspelt one is close to, or ""."""
    near = [] if flag in KNOWN else difflib.get_close_matches(flag[:60], sorted(KNOWN), n=1, cutoff=0.85)
    return near[0] if near else ""


def suggestion(flag: str) -> str:
    """What to use instead of a flag that vLLM refused."""
    if gone := removed(flag):
        return gone
    if near := meant(flag):
        return f"unknown; {near} is meant, perhaps."
    if flag in KNOWN:
        return "unknown to this version though newer ones have it; update vLLM or leave it out."
    return "unknown; leave it out, or see vllm serve --help=all."
