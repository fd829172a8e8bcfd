"""Memory that llama.cpp takes for a GGUF, on the GPU and in host memory, under its log's names.

    model buffer      tensors as the file has them; the embedding stays in host memory, and a tied head is a
                      copy of it on the GPU
    KV buffer         cells of every slot, in whole 256; q8_0 takes 34 bytes for 32 values; layers with a
                      window keep the window and a step, in whole 256
    RS buffer         both states of layers with linear attention, float32, one of each slot
    compute buffer    `llamacpp_graphs.py`; flash attention on CUDA makes f16 of a quantised cache's layer;
                      steps of 32 tokens or more are computed there with copies of weights in host memory,
                      one tensor after the other
    snapshots       states and windows at earlier ends of a prompt, in host memory (`--ctx-checkpoints`)
    output buffer     logits of a token of each slot, in host memory
    mmproj            the tower as its file has it, and its own compute buffer for the largest picture

Experts, then layers, the first ones, may stay in host memory (`--n-cpu-moe`, `-ngl`), where a processor
computes them: nothing crosses the link but activations.
"""

import re
from collections import defaultdict
from functools import lru_cache
from typing import Final

from snugvl.checkpoint.facts import KVLayer, TensorFact
from snugvl.core.memory_kinds import Kind
from snugvl.planner.engines.llamacpp.ggml import compute_bytes
from snugvl.planner.engines.llamacpp.graphs import FLOAT, decoder_graph, tower_graph
from snugvl.planner.footprint.total import Component, predicted, up
from snugvl.planner.footprint.vision import largest_image
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

CELLS: Final = 256  # a cache is made of whole ones
SNAPSHOTS: Final = 4  # of a slot; llama.cpp's own 32 would take gigabytes of host memory
QUANTISED_BLOCK: Final = (32, 34)  # values and bytes of q8_0
HALF: Final = 2
COPIED_SINCE: Final = 32  # tokens of a step whose products with weights in host memory are the GPU's
# Scratch of the decoder's products, which ggml keeps beside its buffers and its log doesn't name.
POOL_BYTES: Final = 16 << 20
HOST_PROCESS_BYTES: Final = 160 << 20  # of `llama-server` or Python with the wheel, beside its buffers
# Gates of a vision tower's MLP, as a checkpoint and as a GGUF have them.
GATES: Final = ("mlp.gate_proj.weight", "mlp.gate_proj.linear.weight", "ffn_gate.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")

EMBEDDING, DECODER, HEAD, TOWER = "embedding", "decoder", "lm_head", "vision tower"
EXPERTS: Final = "experts"
KINDS: Final = {
    DECODER: Kind.WEIGHTS, EXPERTS: Kind.WEIGHTS, EMBEDDING: Kind.EMBEDDING, HEAD: Kind.EMBEDDING,
    TOWER: Kind.VISION,
}  # fmt: skip


def placed(model: Inventory, settings: Settings, *, gpu: bool) -> dict[str, int]:
    """Bytes of weights by part, on the GPU (`gpu`) or in host memory; without a GPU all are in the latter."""
    facts, found = model.facts, defaultdict[str, int](int)
    for (part, layer), nbytes in _weights(model).items():
        if part == TOWER and (settings.language_only or not settings.images):
            continue
        host = part == EMBEDDING or (part == TOWER and settings.vision == "cpu") or not settings.on_gpu
        host = host or 0 <= layer < settings.offloaded or (part == EXPERTS and layer < settings.host_experts)
        if (not host) == gpu:
            found[part] += nbytes
    if gpu and facts.tied:
        found[HEAD] += _weights(model)[EMBEDDING, -1]
    return found


@lru_cache(maxsize=128)
def _weights(model: Inventory) -> dict[tuple[str, int], int]:
    """Bytes of weights by (part, layer); layer -1 for tensors outside of layers."""
    found: dict[tuple[str, int], int] = defaultdict(int)
    for tensor in model.facts.tensors:
        if tensor.loaded:
            found[_part(tensor), _layer(tensor)] += tensor.nbytes
    return found


def _part(tensor: TensorFact) -> str:
    if tensor.role in ("vision", "connector"):
        return TOWER
    named = {"embedding": EMBEDDING, "lm_head": HEAD, "expert": EXPERTS}
    return named.get(tensor.role, DECODER)


def _layer(tensor: TensorFact) -> int:
    match = _LAYER.match(tensor.name)
    return -1 if match is None else int(match[1])


def cells(settings: Settings) -> int:
    """Number of tokens that one slot's cache holds."""
    return up(settings.context, CELLS)


def _cache_bytes(layer: KVLayer, settings: Settings) -> int:
    """Bytes of one layer's cache, all slots together."""
    kept = cells(settings)
    if layer.window is not None:
        kept = min(kept, up(layer.window + settings.chunk, CELLS))
    values = layer.token_values() * kept
    block, nbytes = QUANTISED_BLOCK if settings.kv == "fp8" else (1, HALF)
    return values // block * nbytes * settings.concurrency


def cache_bytes(model: Inventory, settings: Settings, *, gpu: bool) -> tuple[int, int]:
    """Bytes of (keys and values, recurrent states) of the layers on the GPU (`gpu`) or in host memory."""
    layers = model.facts.text.kv_layers
    host = settings.offloaded if settings.on_gpu else len(layers)
    mine = layers[host:] if gpu else layers[:host]
    states = sum(layer.state_bytes for layer in mine) * settings.concurrency
    return sum(_cache_bytes(layer, settings) for layer in mine), states


def snapshot_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of one state snapshot of a slot: recurrent states, and the cells of windows, which can't be
    rolled back to an earlier token."""
    one = settings._replace(concurrency=1)
    layers = model.facts.text.kv_layers
    windows = sum(_cache_bytes(layer, one) for layer in layers if layer.window is not None)
    return windows + sum(layer.state_bytes for layer in layers)


def decoder_bytes(model: Inventory, settings: Settings, *, gpu: bool) -> int:
    """Bytes of the decoder's compute buffer."""
    # All that its graph depends on, so that hundreds of places of experts share one graph.
    alike = Settings(
        settings.engine, context=settings.context, chunk=settings.chunk, concurrency=settings.concurrency
    )
    nbytes = _graph_bytes(model, alike, gpu=gpu)
    if gpu and settings.kv == "fp8":
        widest = max(layer.token_values() for layer in model.facts.text.kv_layers)
        nbytes += HALF * widest * cells(settings)
    return nbytes + (_copied(model, settings) if gpu and settings.chunk >= COPIED_SINCE else 0)


@lru_cache(maxsize=1024)
def _graph_bytes(model: Inventory, settings: Settings, *, gpu: bool) -> int:
    return compute_bytes(decoder_graph(model, settings, cells(settings), gpu=gpu))


def _copied(model: Inventory, settings: Settings) -> int:
    """Bytes of the largest tensor of weights in host memory: they are copied to the GPU one at a time."""
    most = {DECODER: settings.offloaded, EXPERTS: max(settings.offloaded, settings.host_experts)}
    found = (nbytes for (part, layer), nbytes in _largest(model).items() if layer < most[part])
    return max(found, default=0)


@lru_cache(maxsize=128)
def _largest(model: Inventory) -> dict[tuple[str, int], int]:
    """Bytes of the largest matrix of each part of each layer."""
    found: dict[tuple[str, int], int] = {}
    for tensor in model.facts.tensors:
        place = _part(tensor), _layer(tensor)
        if tensor.loaded and len(tensor.shape) > 1 and place[0] in (DECODER, EXPERTS) and place[1] >= 0:
            found[place] = max(found.get(place, 0), tensor.nbytes)
    return found


@lru_cache(maxsize=4096)
def tower_bytes(model: Inventory, max_pixels: int | None) -> int:
    """Bytes of the tower's compute buffer for the largest picture."""
    vision = model.facts.vision
    assert vision is not None, "without a tower there are no pictures"
    patches = largest_image(model, max_pixels).patches
    gated = any(each.role == "vision" and each.name.endswith(GATES) for each in model.facts.tensors)
    return compute_bytes(tower_graph(vision, model.facts.text.hidden_size, patches, gated=gated))


def llamacpp_components(
    model: Inventory, settings: Settings, *, gpu: bool, cublas_bytes: int = 0, api: str = "CUDA"
) -> list[Component]:
    """All components on the GPU, or in host memory where there is none (`gpu` False).

    `api`: how the GPU is reached; Metal has no scratch beside its buffers.
    """
    named = placed(model, settings, gpu=gpu)
    file_type = model.facts.gguf.file_type if model.facts.gguf else ""
    parts = [
        Component(f"weights: {part}", KINDS[part], named[part], why="" if part == TOWER else file_type)
        for part in (DECODER, EXPERTS, EMBEDDING, HEAD, TOWER)
    ]
    cache, states = cache_bytes(model, settings, gpu=gpu)
    slots = f"{settings.concurrency} × " if settings.concurrency > 1 else ""
    why = f"{slots}{cells(settings):,} tokens ({settings.kv_name})"
    parts += [
        Component(Kind.CACHE.value, Kind.CACHE, cache, why=why),
        Component(Kind.STATES.value, Kind.STATES, states, why=f"{slots}one"),
    ]
    text = model.facts.text
    decoder = decoder_bytes(model, settings, gpu=gpu)
    parts.append(predicted("compute buffer", Kind.OTHER, decoder, why=f"steps of {settings.chunk:,} tokens"))
    scratch = POOL_BYTES
    if settings.images and not settings.language_only and (settings.vision == "gpu" or not gpu):
        assert model.facts.vision is not None
        patches = largest_image(model, settings.max_pixels).patches
        # cuBLAS takes the tower's inputs in f16 and gives f16: ggml keeps room for the largest product's
        # (`ggml_cuda_op_mul_mat_cublas`), beside the buffer that its graph needs.
        widths = model.facts.vision.hidden_size + model.facts.vision.intermediate_size
        scratch = max(scratch, HALF * patches * widths)
        why = f"{patches:,} patches"
        parts.append(
            predicted("mmproj compute buffer", Kind.OTHER, tower_bytes(model, settings.max_pixels), why=why)
        )
    if gpu and api != "Metal":
        pool, of = scratch + cublas_bytes, "cuBLAS and scratch" if cublas_bytes else "scratch"
        parts.append(Component(f"{api} pool", Kind.OTHER, pool, basis="default", why=f"{of} of products"))
    if not gpu:
        each = snapshot_bytes(model, settings)
        kept = f"{SNAPSHOTS} a slot, for the next turn"
        output = FLOAT * text.vocab_size * settings.concurrency
        parts.append(Component("output buffer", Kind.OTHER, output))
        parts.append(
            Component("state snapshots", Kind.OTHER, SNAPSHOTS * settings.concurrency * each, why=kept)
        )
    return parts


def host_bytes(model: Inventory, settings: Settings) -> int:
    """Bytes of host memory that llama.cpp takes beside a GPU."""
    weights = sum(placed(model, settings, gpu=False).values())
    cache = sum(cache_bytes(model, settings, gpu=False))
    tower = tower_bytes(model, settings.max_pixels) if settings.images and settings.vision == "cpu" else 0
    buffer = decoder_bytes(model, settings, gpu=False)  # inputs alone where no layer is there
    kept = SNAPSHOTS * settings.concurrency * snapshot_bytes(model, settings)
    return weights + cache + tower + buffer + kept + HOST_PROCESS_BYTES
