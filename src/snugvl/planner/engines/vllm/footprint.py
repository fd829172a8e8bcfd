"""What vLLM holds beside weights and KV, and what it profiles at start (read in vLLM 0.22, 0.32 and 0.33).

    rotary caches, deepstack buffers    made with the weights (`tensors.py`)
    encoder cache       max(max_num_batched_tokens, tokens of the largest image) · (1 + levels) · hidden · 2
    encoder profile     as many of the largest images that `max_pixels` allows as a step's tokens hold, but at
                        least one and at most those of all sequences, whatever is really sent (`profiled`)
    decoder profile     max_num_batched_tokens, as transformers' bytes per token
    experts' workspace  tokens · experts of a token · (max(i, h) + max(2 · i, h)) · 2, for one layer
    sampler profile     max_num_seqs · vocabulary · 12 bytes, when the decoder's activations are gone
    linear attention    what its kernels take of the largest batch: the profile leaves them out, so what
                        exceeds the profile is kept out of vLLM's share, too (`linear_workspace`)
    non-torch           240 MiB beyond the context, fitted to an H200 (published of an H100: 133 MiB)
    CUDA graphs         64 MiB and 2 MiB a sequence (`--max-num-seqs`); none when eager
    scales for Marlin   1.5 % of FP8 weights, on GPUs that don't multiply FP8
    NCCL                several GPUs: vLLM's own communicator at its start, torch's in the profiling run

The profile runs the encoder, the decoder and the sampler one after the other: the largest of them counts.
Published: "3.25 GiB for consumed memory (weights + non-torch), 0.5 GiB for peak activation" for Qwen2.5-1.5B
with 8,192 batched tokens and 256 sequences, where decoder and sampler take 0.50 and 0.43.

All of it but vLLM's own communicator and linear attention beyond the profile is inside
`gpu_memory_utilization` · total, which must be free when vLLM starts.
"""

from functools import lru_cache
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines.vllm.tensors import deepstack_buffers, rotary_caches
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.decoder import LOGIT_BYTES, transformers_prefill
from snugvl.planner.footprint.images import ImageSize, largest_image
from snugvl.planner.footprint.vision import encoder_bytes_per_token, vllm_workspace
from snugvl.planner.inventory import Inventory, widths
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
FP8_BLOCK: Final = 128
STATE_BYTES: Final = 4  # of a value of a recurrent state between steps
LINEAR_CHUNK: Final = 64  # tokens that linear attention takes at a time
UNPROFILED: Final = "linear attention beyond the profile"
FP8_CAPABILITY: Final = (8, 9)  # GPUs that multiply FP8


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
    """Activations of the largest batch, or the logits and sampling of every sequence if those take more."""
    share = settings.tensor_parallel
    w = widths(model)
    whole = transformers_prefill(model, settings.chunk, 0)
    sharded = whole - settings.chunk * 6 * w.i + settings.chunk * 6 * -(-w.i // share)
    sampling = sequences(settings) * model.facts.text.vocab_size * 2 * LOGIT_BYTES
    return max(sharded + experts_workspace(model, settings), sampling)


def experts_workspace(model: Inventory, settings: Settings) -> int:
    """Inputs and outputs of the experts of one layer, for the largest batch; 0 where there are none.

    Source: `TritonExperts.workspace_shapes` (vLLM 0.32, `model_executor/layers/fused_moe`), whose two
    buffers live at once.
    """
    inner = expert_width(model)
    if not inner:
        return 0
    h, inner = widths(model).h, -(-inner // settings.tensor_parallel)
    return settings.chunk * model.facts.text.experts_used * (max(inner, h) + max(2 * inner, h)) * 2


@lru_cache(maxsize=256)
def expert_width(model: Inventory) -> int:
    """Values between the two products of an expert; 0 where there are no experts.

    A file has the experts of a layer in one tensor [experts, 2 · width, hidden] or each in its own
    [width, hidden], and beside them [.., hidden, width].
    """
    shapes = [tensor.shape for tensor in model.facts.tensors if tensor.role == "expert"]
    hidden = model.facts.text.hidden_size
    return min((side for shape in shapes for side in shape[-2:] if side != hidden), default=0)


def sequences(settings: Settings) -> int:
    """`--max-num-seqs` of one copy: those that are sure of their room, and those that may be pre-empted."""
    return max(settings.sequences, settings.concurrency_of_copy)


def graphs(settings: Settings) -> int:
    """CUDA graphs of a few batch sizes. Published: 0.03 to 0.63 GiB; vLLM measures it at start."""
    if settings.eager:
        return 0
    return GRAPH_BASE_BYTES + GRAPH_BYTES_PER_SEQUENCE * sequences(settings)


def linear_workspace(model: Inventory, settings: Settings) -> int:
    """A layer of linear attention at work on the largest batch; 0 where there is none.

    Of a token, with p columns of its projection, c of the convolution, v of all value heads and h hidden, in
    16 bits: the projection p, the convolution's output and its parts 2c, normed queries and keys c - v, w, u,
    the new values and the output 4v, 64 products a head v / 2, hidden states and residual 2h; and a state in
    16 bits for 64 tokens. Source: `chunk_gated_delta_rule_fwd` of vLLM 0.32, which people see fail at work
    ("Tried to allocate 192.00 MiB" for the states of 8,192 tokens).
    """
    most = 0
    for layer, _ in model.kv_layers:
        if not layer.recurrent or not layer.projected:
            continue
        channels, values = layer.channels, layer.values
        columns = layer.projected + 2 * channels + (channels - values) + 4 * values + values // 2
        states = layer.state_bytes // STATE_BYTES // LINEAR_CHUNK
        each = 2 * (columns + states) // settings.tensor_parallel + 4 * model.facts.text.hidden_size
        most = max(most, settings.chunk * each)
    return most


def unprofiled(model: Inventory, settings: Settings) -> int:
    """What linear attention takes beyond all that vLLM profiles, and so leaves free within its share."""
    seen = 0
    if model.facts.vision is not None and settings.images:
        seen = vllm_workspace(model, profiled(model, settings)) + encoder_cache(model, settings)
    return max(0, linear_workspace(model, settings) - max(seen, decoder_profile(model, settings)))


def marlin_scales(model: Inventory, settings: Settings) -> int:
    """What the scales of FP8 blocks take beyond themselves on cards that don't multiply FP8.

    There Marlin reads FP8 weights, with a 16-bit scale for each row and 128 columns instead of a float32 for
    128 × 128: 1.5 % of the weights. Source: `marlin_utils_fp8.py` of vLLM 0.32.
    """
    if settings.weights != "fp8":
        return 0
    values = sum(group.elements * group.count for group in model.groups if group.kind == "fp8")
    spread = values // FP8_BLOCK * 2 - values // FP8_BLOCK**2 * 4
    return spread // (settings.tensor_parallel * settings.pipeline_parallel)


def vllm_components(
    model: Inventory, settings: Settings, compute_capability: tuple[int, int] | None = None
) -> list[Component]:
    """All of it. `compute_capability`: of the GPU; where it isn't known it multiplies FP8."""
    spread = 0
    if compute_capability is not None and compute_capability < FP8_CAPABILITY:
        spread = marlin_scales(model, settings)
    parts = [
        Component(
            "scales for Marlin", Kind.OTHER, spread, why="FP8 weights on a GPU that doesn't multiply FP8"
        ),
        Component(
            UNPROFILED,
            Kind.OTHER,
            unprofiled(model, settings),
            basis="predicted",
            why="vLLM doesn't count it",
        ),
        Component(
            "vLLM non-torch", Kind.OTHER, NON_TORCH_BYTES, basis="default", why="fitted to vLLM 0.22.1, H200"
        ),
        Component(
            "vLLM rotary cache",
            Kind.BUFFERS,
            sum(rotary_caches(model)),
            why="all positions of the model; no flag shrinks it",
        ),
        Component("CUDA graphs", Kind.GRAPHS, graphs(settings), basis="predicted"),
    ]
    sharing = settings.tensor_parallel * settings.pipeline_parallel
    if sharing > 1:
        parts.append(
            Component(
                NCCL, Kind.OTHER, NCCL_BYTES, basis="default", why=f"{sharing} GPUs; measured for two H200s"
            )
        )
        parts.append(
            Component(
                NCCL_TORCH,
                Kind.OTHER,
                NCCL_TORCH_BYTES,
                basis="default",
                why="made by the first gathering of logits",
            )
        )
    if model.facts.vision is not None and settings.images:
        image = profiled(model, settings)
        why = f"{image.patches:,} patches ({image.tokens:,} image tokens), profiled at start"
        workspace = vllm_workspace(model, image)
        cached = encoder_cache(model, settings)
        parts += [
            Component("vLLM deepstack buffers", Kind.BUFFERS, sum(deepstack_buffers(model, settings.chunk))),
            Component("vision workspace", Kind.WORKSPACE, workspace, "vision", "predicted", why),
            Component(
                "encoder cache",
                Kind.ENCODINGS,
                cached,
                why=f"{cached // encoder_bytes_per_token(model):,} tokens",
            ),
        ]
    why = f"{settings.chunk:,} batched tokens, profiled at start"
    parts.append(
        Component(
            "prefill workspace", Kind.WORKSPACE, decoder_profile(model, settings), "prefill", "predicted", why
        )
    )
    return parts
