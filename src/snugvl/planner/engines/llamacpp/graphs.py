"""The graphs that llama.cpp reserves its compute buffers for, tensor by tensor (`src/models`, `tools/mtmd`).

They are the decoder's step of `chunk` tokens with a full cache, and the vision tower's largest picture.
Layers are alike, so a few stand for all. Sizes are of float32 activations, [tokens, width]; the mask of flash
attention has 16 bits. llama.cpp of October 2026 takes rows of the embedding twice, for batches of text with
pictures. Measured on a CPU (`tests/backends/llamacpp/buffers.py`): exact for most, -8 to +14 % where
queries are wider than the hidden state and pictures enter several layers.
"""

from dataclasses import dataclass
from typing import Final

from snugvl.checkpoint.facts import KVLayer, VisionFacts
from snugvl.checkpoint.families import traits_of
from snugvl.planner.engines.llamacpp.ggml import Graph, Node
from snugvl.planner.engines.vllm.footprint import expert_width
from snugvl.planner.inventory import Inventory
from snugvl.planner.settings import Settings

FLOAT: Final = 4
LAYERS: Final = 8  # of a graph: buffers grow no more after these
POSITION_BYTES: Final = 16  # M-RoPE's four


def decoder_graph(model: Inventory, settings: Settings, cells: int, *, gpu: bool) -> Graph:
    """One step of a whole chunk over `cells` tokens of a slot's cache.

    `gpu`: rows of the embedding come from host memory.
    """
    text, gguf = model.facts.text, model.facts.gguf
    assert gguf is not None, "only a GGUF runs on llama.cpp"
    tokens, slots = settings.chunk, settings.concurrency
    wide = FLOAT * text.hidden_size * tokens
    inputs = wide * (1 + gguf.deepstack)
    graph = Graph()
    if gpu:
        rows, other = graph.input(wide), graph.input(wide)
    else:
        ids, mixed_ids = graph.input(4 * tokens), graph.input(4 * tokens)
    mixed, places = graph.input(inputs), graph.input(8 * tokens)
    if not gpu:
        graph.input(inputs)  # for batches of pictures
    positions, indices = graph.input(POSITION_BYTES * tokens), graph.input(8 * tokens)
    mask, last = graph.input(2 * cells * tokens), graph.input(4 * slots)
    if not gpu:
        rows, other = graph.add(wide, ids), graph.add(wide, mixed_ids)
    if gguf.deepstack:
        padded, other = graph.add(inputs, rows), graph.add(inputs, other)
        x = graph.view(padded, wide)
    else:
        x = rows
    copy = graph.add(inputs, mixed)
    graph.nodes.append(Node(inputs, (other, places, copy), view=copy))
    levels = x if gguf.deepstack else None
    layers = text.kv_layers[:LAYERS]
    for number, layer in enumerate(layers):
        shared = _Step(model, graph, layer, tokens, slots, positions, indices, mask)
        attended = shared.attention(x) if not layer.recurrent else shared.linear_attention(x)
        if number == len(layers) - 1:
            tokens = slots  # only the last tokens go on
            width = FLOAT * text.hidden_size * slots
            attended, x = graph.add(width, attended, last), graph.add(width, x, last)
        summed = graph.over(attended, x)
        x = graph.over(_feed_forward(model, graph, summed, tokens), summed)
        if levels is not None and number < gguf.deepstack:
            x = graph.over(x, graph.view(levels, wide))
    graph.add(FLOAT * text.vocab_size * slots, _normed(graph, x), output=True)
    return graph


def _normed(graph: Graph, x: Node) -> Node:
    return graph.over(graph.over(x))


@dataclass(frozen=True, slots=True)
class _Step:
    """One layer's attention over one chunk."""

    model: Inventory
    graph: Graph
    layer: KVLayer
    tokens: int
    slots: int
    positions: Node
    indices: Node
    mask: Node

    def attention(self, x: Node) -> Node:
        """Add attention over `x` and return its output: projections, writes to the cache, flash attention."""
        graph, text = self.graph, self.model.facts.text
        queries = text.num_heads * self.layer.head_dim
        keys = self.layer.kv_heads * self.layer.head_dim
        gated = traits_of(self.model.facts.family).gated_queries  # queries come with a gate of their width
        normed = _normed(graph, x)
        q = self._rotated(self._projected(normed, queries * (2 if gated else 1)), queries if gated else 0)
        v = self._projected(normed, keys)
        k = self._rotated(self._projected(normed, keys))
        graph.add(0, graph.view(k), self.indices)
        graph.add(0, graph.view(v), self.indices)
        attended = graph.add(FLOAT * queries * self.tokens, graph.view(graph.view(q)), self.mask)
        attended = graph.view(attended)
        if gated:
            gate = graph.over(graph.add(FLOAT * queries * self.tokens, normed))
            attended = graph.over(attended, gate)
        return graph.add(FLOAT * text.hidden_size * self.tokens, attended)

    def linear_attention(self, x: Node) -> Node:
        """Add the gated delta rule over `x`, return its output: convolution, states, norm (`qwen35.cpp`)."""
        graph, tokens, layer = self.graph, self.tokens, self.layer
        normed = _normed(graph, x)
        channels, values = layer.channels, layer.values
        projected = graph.add(FLOAT * channels * tokens, normed)
        kept = layer.state_bytes * self.slots  # both states of every slot
        joined = graph.add(FLOAT * channels * (tokens + 3 * self.slots), graph.view(projected))
        states = graph.add(kept)
        mixed = graph.over(graph.add(FLOAT * channels * tokens, joined))
        side = FLOAT * (channels - values) // 2 * tokens
        q, k = (graph.over(graph.add(side, graph.view(mixed, side))) for _ in range(2))
        v = graph.view(mixed, FLOAT * values * tokens)
        ruled = graph.add(FLOAT * values * tokens + kept, q, k, v, states)
        output = graph.add(FLOAT * values * tokens, graph.view(ruled, FLOAT * values * tokens))
        gate = graph.over(graph.add(FLOAT * values * tokens, normed))
        gated = graph.over(graph.over(output), gate)
        return graph.add(FLOAT * self.model.facts.text.hidden_size * tokens, gated)

    def _projected(self, x: Node, width: int) -> Node:
        return self.graph.view(self.graph.add(FLOAT * width * self.tokens, x))

    def _rotated(self, x: Node, width: int = 0) -> Node:
        """Add norm (where the model has one) and rotation of `x`; `width`: of a part that is taken first."""
        if width:
            x = self.graph.add(FLOAT * width * self.tokens, x)
        elif self.model.qk_norm:
            x = self.graph.over(x)
        if self.model.qk_norm:
            x = self.graph.over(x)
        return self.graph.over(x, self.positions)


def _feed_forward(model: Inventory, graph: Graph, summed: Node, tokens: int) -> Node:
    normed = _normed(graph, summed)
    text = model.facts.text
    wide = FLOAT * text.hidden_size * tokens
    if not text.experts_used:
        inner = FLOAT * text.intermediate_size * tokens
        gate, up = graph.add(inner, normed), graph.add(inner, normed)
        return graph.add(wide, graph.add(inner, gate, up))
    experts = next(tensor.shape[0] for tensor in model.facts.tensors if tensor.role == "expert")
    logits = graph.add(FLOAT * experts * tokens, normed)
    chances = graph.over(logits)
    ranked = graph.view(graph.add(FLOAT * experts * tokens, chances))
    weights = graph.over(graph.add(FLOAT * text.experts_used * tokens, graph.view(chances), ranked))
    inner = FLOAT * expert_width(model) * text.experts_used * tokens
    seen = graph.view(normed)
    gate, up = graph.add(inner, seen, ranked), graph.add(inner, seen, ranked)
    down = graph.add(wide * text.experts_used, graph.add(inner, gate, up), ranked)
    weighed = graph.over(down, weights)
    parts = [graph.view(weighed, wide) for _ in range(text.experts_used)]
    total = graph.add(wide, *parts[:2])
    for part in parts[2:]:
        total = graph.over(total, part)
    return total


def tower_graph(vision: VisionFacts, out: int, patches: int, *, gated: bool = False) -> Graph:
    """A picture of `patches` patches through Qwen's tower (`qwen3vl.cpp`). `out`: the decoder's width;
    `gated`: its MLP has a gate, as Gemma 4's (`gemma4v.cpp`)."""
    graph, hidden = Graph(), FLOAT * vision.hidden_size * patches
    pixels, positions = graph.input(FLOAT * vision.patch_dim * patches), graph.input(POSITION_BYTES * patches)
    halves = []
    for _ in range(2):  # two frames of a video, of a picture the same twice
        columns = graph.add(2 * vision.patch_dim * patches, pixels)
        halves.append(graph.add(hidden, graph.view(graph.add(hidden, graph.view(columns)))))
    x = graph.over(halves[0], halves[1])
    for _ in range(2):
        x = graph.add(hidden, graph.view(x))
    x = graph.over(x)
    learned = graph.add(hidden)
    for _ in range(3):
        learned = graph.add(hidden, graph.view(learned))
    x = graph.over(x, learned)
    merged = vision.merge_size**2
    x = _block(graph, vision, x, hidden, patches, positions, gated=gated)
    kept = []  # what the extra mergers look at, which llama.cpp runs after all blocks
    for _ in range(vision.deepstack_levels):
        kept.append(x)
        x = _block(graph, vision, x, hidden, patches, positions, gated=gated)
    width = FLOAT * out * patches // merged
    embedded = _merger(graph, graph.over(graph.over(graph.over(x))), hidden, width)
    features: Node | None = None
    for level in kept:
        feature = _merger(graph, level, hidden, width, normed=True)
        features = feature if features is None else graph.add(features.nbytes + width, features, feature)
    if features is not None:
        embedded = graph.add(width + features.nbytes, embedded, features)
    embedded.output = True
    return graph


def _block(
    graph: Graph,
    vision: VisionFacts,
    x: Node,
    hidden: int,
    patches: int,
    positions: Node,
    *,
    gated: bool = False,
) -> Node:
    normed = graph.over(graph.over(graph.over(x)))
    joined = graph.over(graph.add(3 * hidden, normed))
    q, k = (graph.add(hidden, graph.view(joined, hidden), positions) for _ in range(2))
    k, v = graph.add(hidden // 2, graph.view(k)), graph.add(hidden // 2, graph.view(joined, hidden))
    attended = graph.view(graph.add(hidden, graph.view(q), k, v))
    x = graph.over(graph.over(graph.add(hidden, attended)), x)
    wide, entered = FLOAT * vision.intermediate_size * patches, graph.over(graph.over(graph.over(x)))
    inner = graph.over(graph.over(graph.add(wide, entered)))
    if gated:
        inner = graph.over(graph.add(wide, entered), inner)
    return graph.over(x, graph.over(graph.add(hidden, inner)))


def _merger(graph: Graph, x: Node, hidden: int, out: int, *, normed: bool = False) -> Node:
    part = graph.view(x)
    if normed:
        part = graph.over(graph.over(graph.over(part)))
    inner = graph.over(graph.over(graph.add(hidden, part)))
    return graph.over(graph.add(out, inner))
