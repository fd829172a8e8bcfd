"""Memory that vLLM takes beside weights and KV, and its profiling run (read in vLLM 0.22, 0.32 and 0.33).

    rotary caches, deepstack buffers    made with the weights (`tensors.py`)
    encoder cache       max(max_num_batched_tokens, tokens of the largest image) · (1 + levels) · hidden · 2
    encoder profile     as many of the largest images that `max_pixels` allows as a step's tokens hold, but at
                        least one and at most those of all sequences, whatever is really sent (`profiled`)
    decoder profile     max_num_batched_tokens, as transformers' bytes per token
    experts' workspace  tokens · experts of a token · (max(i, h) + max(2 · i, h)) · 2, for one layer
    sampler profile     max_num_seqs · vocabulary · 12 bytes, when the decoder's activations are gone
    linear attention    what its kernels take of the largest batch: the profile leaves them out, so what
                        exceeds the profile is also kept out of vLLM's share (`linear_workspace`)
    non-torch           240 MiB beyond the context, fitted to an H200 (published of an H100: 133 MiB)
    CUDA graphs         64 MiB and 2 MiB a sequence (`--max-num-seqs`); none when eager
    scales for Marlin   1.5 % of FP8 weights, on GPUs that don't multiply FP8
    NCCL                several GPUs: vLLM's own communicator at its start, torch's in the profiling run

The profile runs the encoder, the decoder and the sampler one after the other: the largest of them counts.
Published: "3.25 GiB for consumed memory (weights + non-torch), 0.5 GiB for peak activation" for Qwen2.5-1.5B
with 8,192 batched tokens and 256 sequences, where decoder and sampler take 0.50 and 0.43.

All of it but vLLM's own communicator and linear attention beyond the profile is inside
`gpu_memory_utilization` · total, which must be free when vLLM starts.

**The pool of KV blocks**: how large a block is, and how many a sequence takes. Read in vLLM 0.32,
`v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py` and `platforms/interface.py`, and checked against
published logs (`tests/docs/published_vllm.py`). Layers of a kind (full attention, a window, recurrent states)
are dealt into groups of equally many layers, and every group takes blocks of one pool:

    layers of a group   the rarest kind's layers; the commonest's where those are fewer than 1.5 times as many
    block               layers of a group · page of a layer
    page                tokens of a block · 2 · kv_heads · head_dim · bytes
    tokens of a block   16; with states the next multiple of 16 whose page holds a layer's states, which are
                        padded to it: 528 for Qwen3.5-4B and -9B, 544 for -2B

A sequence of `context` tokens takes, of every group:

    full attention      ⌈context / tokens of a block⌉
    window              ⌈min(window - 1 + tokens in flight, context) / tokens of a block⌉ + 1
    states              2 with prefix caching (vLLM's default: the running state and the last one that can be
                        shared), 1 without

Tokens in flight are those of two steps, as scheduling overlaps with the step that runs. The log's "GPU KV
cache size" is context · blocks / blocks of a sequence; before 0.21 or so it was blocks / groups · tokens of a
block.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines.transformers.footprint import LOGIT_BYTES, transformers_prefill
from snugvl.planner.engines.vllm.tensors import deepstack_buffers, loading_bytes, rotary_caches, tensors_of
from snugvl.planner.footprint.total import Component, predicted
from snugvl.planner.footprint.vision import ImageSize, encoder_bytes_per_token, largest_image, vllm_workspace
from snugvl.planner.footprint.weights import KINDS, LABELS, part_why
from snugvl.planner.inventory import PARTS, Inventory, Part, widths
from snugvl.planner.settings import BLOCK_TOKENS, Settings

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
ASYNC_STEPS: Final = 2
STATES_WITH_PREFIX_CACHE: Final = 2
SIMILAR: Final = 1.5  # kinds with fewer than so many times the rarest's layers are filled up, not split


def encoder_cache(model: Inventory, settings: Settings) -> int:
    """Bytes of encoder outputs that may be held: at least those of one largest image."""
    if model.facts.vision is None or not settings.images:
        return 0
    tokens = max(settings.chunk, largest_image(model, settings.max_pixels).tokens)
    return tokens * encoder_bytes_per_token(model)


def profiled(model: Inventory, settings: Settings) -> ImageSize:
    """Tokens and patches of the images that vLLM encodes together in its profiling run."""
    image = largest_image(model, settings.max_pixels)
    many = max(1, min(settings.chunk // max(image.tokens, 1), settings.images * max_sequences(settings)))
    return ImageSize(image.tokens * many, image.patches * many)


def decoder_profile(model: Inventory, settings: Settings) -> int:
    """Bytes of activations of the largest batch, or of logits and sampling where those are more."""
    share = settings.tensor_parallel
    w = widths(model)
    whole = transformers_prefill(model, settings.chunk, 0)
    sharded = whole - settings.chunk * 6 * w.i + settings.chunk * 6 * -(-w.i // share)
    sampling = max_sequences(settings) * model.facts.text.vocab_size * 2 * LOGIT_BYTES
    return max(sharded + experts_workspace(model, settings), sampling)


def experts_workspace(model: Inventory, settings: Settings) -> int:
    """Bytes of inputs and outputs of one layer's experts, for the largest batch; 0 without experts.

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
    """Intermediate width of an expert, in values; 0 without experts.

    A file has a layer's experts in one tensor [experts, 2 · width, hidden] or each in its own
    [width, hidden], and beside them [.., hidden, width].
    """
    shapes = [tensor.shape for tensor in model.facts.tensors if tensor.role == "expert"]
    hidden = model.facts.text.hidden_size
    return min((side for shape in shapes for side in shape[-2:] if side != hidden), default=0)


def max_sequences(settings: Settings) -> int:
    """`--max-num-seqs` of one copy: sequences with room for whole contexts, and those to be preempted."""
    return max(settings.sequences, settings.concurrency_of_copy)


def graphs(settings: Settings) -> int:
    """Bytes of CUDA graphs of a few batch sizes. Published: 0.03 to 0.63 GiB; vLLM measures it at start."""
    if settings.eager:
        return 0
    return GRAPH_BASE_BYTES + GRAPH_BYTES_PER_SEQUENCE * max_sequences(settings)


def linear_workspace(model: Inventory, settings: Settings) -> int:
    """Bytes of workspace of a layer of linear attention, for the largest batch; 0 without such layers.

    Values of 16 bits a token, with p columns of the projection, c of the convolution, v of all value heads
    and h hidden: the projection p, the convolution's output and its parts 2c, normed queries and keys c - v,
    w, u, the new values and the output 4v, 64 products a head v / 2, hidden states and residual 2h; and a
    state for every 64 tokens. Source: `chunk_gated_delta_rule_fwd` of vLLM 0.32, which people see run out of
    memory ("Tried to allocate 192.00 MiB" for the states of 8,192 tokens).
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
    """Bytes that linear attention takes beyond vLLM's profile, which are therefore kept out of its share."""
    seen = 0
    if model.facts.vision is not None and settings.images:
        seen = vllm_workspace(model, profiled(model, settings)) + encoder_cache(model, settings)
    return max(0, linear_workspace(model, settings) - max(seen, decoder_profile(model, settings)))


def marlin_scales(model: Inventory, settings: Settings) -> int:
    """Additional bytes of the scales of FP8 blocks on cards that don't multiply FP8.

    There Marlin's kernels read FP8 weights, with a 16-bit scale for each row and 128 columns instead of a
    float32 for 128 × 128: 1.5 % of the weights. Source: `marlin_utils_fp8.py` of vLLM 0.32.
    """
    if settings.weights != "fp8":
        return 0
    values = sum(group.elements * group.count for group in model.groups if group.kind == "fp8")
    spread = values // FP8_BLOCK * 2 - values // FP8_BLOCK**2 * 4
    return spread // (settings.tensor_parallel * settings.pipeline_parallel)


def vllm_components(
    model: Inventory, settings: Settings, compute_capability: tuple[int, int] | None = None
) -> list[Component]:
    """Components of all of it. `compute_capability`: of the GPU; an unknown one is taken to multiply FP8."""
    spread = 0
    if compute_capability is not None and compute_capability < FP8_CAPABILITY:
        spread = marlin_scales(model, settings)
    parts = [
        Component(
            "scales for Marlin", Kind.OTHER, spread, why="FP8 weights on a GPU that doesn't multiply FP8"
        ),
        predicted(UNPROFILED, Kind.OTHER, unprofiled(model, settings), why="vLLM doesn't count it"),
        Component(
            "vLLM non-torch", Kind.OTHER, NON_TORCH_BYTES, basis="default", why="fitted to vLLM 0.22.1, H200"
        ),
        Component(
            "vLLM rotary cache",
            Kind.BUFFERS,
            sum(rotary_caches(model)),
            why="all positions of the model; no flag shrinks it",
        ),
        predicted("CUDA graphs", Kind.GRAPHS, graphs(settings)),
    ]
    sharing = settings.tensor_parallel * settings.pipeline_parallel
    if sharing > 1:
        why = f"{sharing} GPUs; measured for two H200s"
        later = "made by the first gathering of logits"
        parts += [
            Component(NCCL, Kind.OTHER, NCCL_BYTES, basis="default", why=why),
            Component(NCCL_TORCH, Kind.OTHER, NCCL_TORCH_BYTES, basis="default", why=later),
        ]
    if model.facts.vision is not None and settings.images:
        image = profiled(model, settings)
        why = f"{image.patches:,} patches ({image.tokens:,} image tokens), profiled at start"
        workspace = vllm_workspace(model, image)
        cached = encoder_cache(model, settings)
        parts += [
            Component("vLLM deepstack buffers", Kind.BUFFERS, sum(deepstack_buffers(model, settings.chunk))),
            predicted("vision workspace", Kind.WORKSPACE, workspace, "vision", why=why),
            Component(
                "encoder cache",
                Kind.ENCODINGS,
                cached,
                why=f"{cached // encoder_bytes_per_token(model):,} tokens",
            ),
        ]
    why = f"{settings.chunk:,} batched tokens, profiled at start"
    parts.append(
        predicted("prefill workspace", Kind.WORKSPACE, decoder_profile(model, settings), "prefill", why=why)
    )
    return parts


def vllm_weight_components(model: Inventory, settings: Settings) -> tuple[Component, ...]:
    """Components of weights as vLLM holds them on one GPU, with the allocator's rounding of them and of the
    rotary caches.

    "Model loading took" has the rounding in it; what is left over in segments is free for small activations,
    but no segment with a tensor in it goes back to the driver.
    """
    nbytes: dict[Part, int] = defaultdict(int)
    for tensor in tensors_of(model, settings):
        nbytes[tensor.part] += tensor.nbytes
    share = settings.tensor_parallel * settings.pipeline_parallel
    parts = [
        Component(LABELS[part], KINDS[part], nbytes[part], why=part_why(model, part, settings, share))
        for part in PARTS
        if nbytes[part]
    ]
    allocator = loading_bytes(model, settings._replace(chunk=0))
    rounding = allocator.allocated - sum(nbytes.values()) - sum(rotary_caches(model))
    left_over = allocator.reserved - allocator.allocated
    return (
        *parts,
        predicted("allocator rounding", Kind.ROUNDING, rounding, why="multiples of 512 bytes and 2 MiB"),
        predicted("left over in segments", Kind.OTHER, left_over, why="segments of 2 and 20 MiB"),
    )


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that take blocks together. `window`: tokens they look back, or None; `states`: are recurrent."""

    window: int | None
    states: bool


@dataclass(frozen=True, slots=True)
class Pages:
    """The layout of one GPU's pool of KV blocks.

    Attributes:
        block_tokens: tokens of a block of attention.
        block_bytes: bytes of a block, for all layers of a group.
        groups: each takes blocks of its own for a sequence.
    """

    block_tokens: int
    block_bytes: int
    groups: tuple[PageGroup, ...]

    def blocks(self, context: int, batched_tokens: int, states: int = STATES_WITH_PREFIX_CACHE) -> int:
        """Number of blocks that vLLM keeps ready for one sequence of `context` tokens.

        `batched_tokens`: `max_num_batched_tokens`; `states`: number of blocks of a group with states.
        """
        return sum(self._blocks(group, context, batched_tokens, states) for group in self.groups)

    def _blocks(self, group: PageGroup, context: int, batched_tokens: int, states: int) -> int:
        if group.states:
            return states
        if group.window is None:
            return -(-context // self.block_tokens)
        seen = min(group.window - 1 + ASYNC_STEPS * batched_tokens, context)
        return -(-seen // self.block_tokens) + 1


def pages(model: Inventory, settings: Settings) -> Pages:
    """The pool's layout for `settings`."""
    return _pages(
        model, settings.kv_itemsize, settings.itemsize, settings.tensor_parallel, settings.pipeline_parallel
    )


@lru_cache(maxsize=256)
def _pages(model: Inventory, kv_itemsize: int, itemsize: int, gpus: int, stages: int) -> Pages:
    kinds: dict[PageGroup, int] = {}
    token = state = 0
    for layer, count in model.kv_layers:
        group = PageGroup(layer.window, states=layer.recurrent)
        kinds[group] = kinds.get(group, 0) + -(-count // stages)
        token = max(token, layer.token_values(gpus) * kv_itemsize)
        state = max(state, -(-layer.state(itemsize) // gpus))
    rarest, commonest = min(kinds.values()), max(kinds.values())
    layers = commonest if commonest < SIMILAR * rarest else rarest
    groups = tuple(group for group, count in kinds.items() for _ in range(-(-count // layers)))
    if not token:  # states alone
        return Pages(BLOCK_TOKENS, layers * state, groups)
    block_tokens = BLOCK_TOKENS * max(1, -(-state // (BLOCK_TOKENS * token)))
    return Pages(block_tokens, layers * block_tokens * token, groups)
