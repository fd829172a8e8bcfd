"""What vLLM holds beside weights and KV, and what it profiles at start (read in vLLM 0.33).

    M-RoPE cache        4 · max_position · head_dim · 2 bytes: four times the positions
    deepstack buffers   levels · max_num_batched_tokens · hidden · 2 bytes
    encoder cache       max(max_num_batched_tokens, tokens of the largest image) · (1 + levels) · hidden · 2
    encoder profile     one forward of the largest image that `max_pixels` allows, whatever is really sent
    decoder profile     max_num_batched_tokens, as transformers' bytes per token
    non-torch           0.13 GiB beyond the context (published H100 table)
    NCCL                several GPUs: vLLM's own communicator at its start, torch's in the profiling run

All of it but vLLM's own communicator is inside `gpu_memory_utilization` · total, which must be free when
vLLM starts.
"""

from typing import Final

from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.decoder import LOGIT_BYTES, transformers_prefill
from snugvl.planner.footprint.images import ImageSize, largest_image
from snugvl.planner.footprint.vision import encoder_bytes_per_token, vllm_workspace
from snugvl.planner.footprint.widths import widths
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

# What is left of the smallest free memory in which vLLM 0.22.1 served Qwen3-VL-2B-FP8 and -4B-FP8 on an H200
# (4.22 GiB peak; between 6.5 and 6.625 GiB) when all else here is taken away. Published for an H100: 133 MiB.
NON_TORCH_BYTES: Final = 240 * (1 << 20)
# vLLM 0.22.1 with tensor parallel 2 on two H200s: a process has 1,562 MiB before vLLM looks at what is free,
# of which 719 MiB are the context's. vLLM does not count it either.
NCCL_BYTES: Final = 864 * (1 << 20)
NCCL: Final = "NCCL"
# vLLM gathers logits through a communicator of torch's, which the first step makes, so profiling does: there
# its "non-torch memory" was 553 to 563 MiB, with 4B and 8B.
NCCL_TORCH_BYTES: Final = 352 * (1 << 20)
NCCL_TORCH: Final = "torch's NCCL"
GRAPH_BASE_BYTES: Final = 64 * (1 << 20)
GRAPH_BYTES_PER_SEQUENCE: Final = 2 * (1 << 20)
MROPE_FACTOR: Final = 4
MROPE_FAMILIES: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl")


def position_cache(model: Inventory) -> int:
    """Cosines and sines of every position the model allows (`--max-model-len` does not shrink it)."""
    factor = MROPE_FACTOR if model.facts.family in MROPE_FAMILIES else 1
    return factor * model.facts.text.max_position_embeddings * widths(model).d * 2


def deepstack_buffers(model: Inventory, batched_tokens: int) -> int:
    """Inputs of the first decoder layers, for the largest batch."""
    vision = model.facts.vision
    return vision.deepstack_levels * batched_tokens * widths(model).h * 2 if vision else 0


def encoder_cache(model: Inventory, settings: Settings) -> int:
    """Encoder outputs that may be held: at least those of one largest image."""
    if model.facts.vision is None or not settings.images:
        return 0
    tokens = max(settings.chunk, largest_image(model, settings.max_pixels).tokens)
    return tokens * encoder_bytes_per_token(model)


def profiled(model: Inventory, settings: Settings) -> ImageSize:
    """The images that vLLM encodes together when it profiles: as many as its encoder budget holds."""
    image = largest_image(model, settings.max_pixels)
    many = max(1, min(settings.chunk // max(image.tokens, 1), settings.images * sequences(settings)))
    return ImageSize(image.tokens * many, image.patches * many)


def decoder_profile(model: Inventory, settings: Settings) -> int:
    """Activations of the largest batch, and the logits and sampling of every sequence."""
    share = settings.tensor_parallel
    w = widths(model)
    whole = transformers_prefill(model, settings.chunk, 0)
    sharded = whole - settings.chunk * 6 * w.i + settings.chunk * 6 * -(-w.i // share)
    return sharded + sequences(settings) * model.facts.text.vocab_size * 2 * LOGIT_BYTES


def sequences(settings: Settings) -> int:
    """`--max-num-seqs` of one copy: those that are sure of their room, and those that may be pre-empted."""
    return max(settings.sequences, settings.concurrency_of_copy)


def graphs(settings: Settings) -> int:
    """CUDA graphs of a few batch sizes. Published: 0.03 to 0.63 GiB; vLLM measures it at start."""
    if settings.eager:
        return 0
    return GRAPH_BASE_BYTES + GRAPH_BYTES_PER_SEQUENCE * sequences(settings)


def vllm_components(model: Inventory, settings: Settings) -> list[Component]:
    """All of it."""
    parts = [
        Component("vLLM non-torch", NON_TORCH_BYTES, basis="default", why="fitted to vLLM 0.22.1, H200"),
        Component(
            "vLLM rotary cache", position_cache(model), why="all positions of the model; no flag shrinks it"
        ),
        Component("CUDA graphs", graphs(settings), basis="predicted"),
    ]
    sharing = settings.tensor_parallel * settings.pipeline_parallel
    if sharing > 1:
        parts.append(
            Component(NCCL, NCCL_BYTES, basis="default", why=f"{sharing} GPUs; measured for two H200s")
        )
        parts.append(
            Component(
                NCCL_TORCH, NCCL_TORCH_BYTES, basis="default", why="made by the first gathering of logits"
            )
        )
    if model.facts.vision is not None and settings.images:
        image = profiled(model, settings)
        why = f"{image.patches:,} patches ({image.tokens:,} image tokens), profiled at start"
        workspace = vllm_workspace(model, image)
        cached = encoder_cache(model, settings)
        parts += [
            Component("vLLM deepstack buffers", deepstack_buffers(model, settings.chunk)),
            Component("vision workspace", workspace, "vision", "predicted", why),
            Component("encoder cache", cached, why=f"{cached // encoder_bytes_per_token(model):,} tokens"),
        ]
    why = f"{settings.chunk:,} batched tokens, profiled at start"
    parts.append(
        Component("prefill workspace", decoder_profile(model, settings), "prefill", "predicted", why)
    )
    return parts
