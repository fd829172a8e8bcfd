"""A tiny network that notices every mistake of the engine, and an oracle that knows no engine.

Real paged attention in two layers; all three rows of the positions enter the keys, the deepstack level the
second layer, and an image's rows depend on the whole image: a wrong slot, position, row or order changes
the tokens. float64, so that batching changes logits by 1e-15 and never by a near tie.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import nn

from snugvl.checkpoint.architecture import (
    LinearAttention,
    ModelConfig,
    Rope,
    TextConfig,
    VisionConfig,
    VisionTokens,
)
from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.memory import allocate
from snugvl.engine.request import EngineRequest, TokenOutput, VisionItem
from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.delta_rule import Rule, recur_at, scan_at
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import ForwardBatch, GridTHW, PatchReader
from snugvl.models.linear_attention import empty_beginners, keep, runs_of
from snugvl.models.rope import mrope_positions

VOCAB, HIDDEN, HEADS, DIM, LAYERS = 48, 16, 2, 8, 2
IMAGE, VIDEO, POISON, BOMB = 44, 45, 46, 47  # POISON makes NaN, BOMB raises inside the network
CONFIG = ModelConfig(
    architecture="Toy",
    text=TextConfig(
        HIDDEN,
        LAYERS,
        HEADS,
        1,
        DIM,
        32,
        VOCAB,
        4096,
        1e-6,
        Rope(1e4, DIM, (2, 1, 1), True),
        ("full",) * LAYERS,
    ),
    vision=VisionConfig(1, 8, 16, 1, 3, 2, 1, 2, HIDDEN, 16, (0,), "gelu_pytorch_tanh", 1e4),
    tie_word_embeddings=True,
    vision_tokens=VisionTokens(IMAGE, VIDEO, 42, 43),
    dtype="float64",
)


class Toy(nn.Module):
    """`Network` in miniature."""

    plan = CONFIG
    expert_cache = None

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = self.plan
        self.encoded: list[GridTHW] = []
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype))

        self.embed = weight(VOCAB, HIDDEN)
        self.position = weight(3, HIDDEN)
        self.qkv = nn.ParameterList(weight((HEADS + 2) * DIM, HIDDEN) for _ in range(LAYERS))
        self.out = nn.ParameterList(weight(HIDDEN, HEADS * DIM) for _ in range(LAYERS))
        self.head = weight(VOCAB, HIDDEN)  # untied, or the toy repeats its input
        self.patch = weight(2 * HIDDEN, 4 * CONFIG.vision.patch_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def tower_is_capturable(self) -> bool:
        return True

    @property
    def capturable_tokens(self) -> int | None:
        return None

    def encode_vision(self, patches: torch.Tensor, grids: Sequence[GridTHW]) -> torch.Tensor:
        self.encoded += grids
        images = patches.split([t * h * w for t, h, w in grids])
        return torch.cat(
            [(rows := p.reshape(-1, 4 * p.shape[1]) @ self.patch.T) + rows.mean(0) for p in images]
        )

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        """A stop for every row of patches, a thousand operations each."""
        t, h, w = grid
        rows = []
        for row in range(t * h):
            rows.append(read(row * w, (row + 1) * w))
            yield 1000
        return self.encode_vision(torch.cat(rows), [grid])

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        if (batch.input_ids == BOMB).any():
            raise RuntimeError("the bomb went off")
        x = self.embed[batch.input_ids]
        x = x.masked_fill((batch.input_ids == POISON)[:, None], torch.nan)
        rows, embeds = batch.vision_rows, batch.vision_embeds
        if rows is not None and rows.dtype == torch.bool:
            assert not embeds[~rows].any(), "a row that holds no placeholder"
            embeds = embeds[rows]
        if rows is not None:
            x[rows] = embeds[:, :HIDDEN]
        turn = torch.sin(batch.positions.to(self.dtype).T @ self.position)
        for layer in range(LAYERS):
            normed = x / x.pow(2).mean(-1, keepdim=True).sqrt() + turn
            mixed = self.mix(layer, normed @ self.qkv[layer].T, cache, batch.attention)
            x = x + torch.tanh(mixed.flatten(1) @ self.out[layer].T)
            if layer == 0 and rows is not None:
                x[rows] += embeds[:, HIDDEN:]
        if batch.scoring is not None:
            for start in range(0, len(batch.scoring.rows), batch.scoring.at_once):
                wanted = batch.scoring.rows[start : start + batch.scoring.at_once]
                batch.scoring.look(start, self.logits(x[wanted]))
        return self.logits(batch.wanted(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """It never generates an image, a poison or a bomb; NaN stays NaN."""
        logits = (x @ self.head.T).float() / 4
        logits[:, 42:] -= 1000
        return logits

    def mix(self, layer: int, qkv: torch.Tensor, cache: KVCache, metadata: AttentionMetadata) -> torch.Tensor:
        """What a layer brings from other tokens, `[tokens, HEADS, DIM]`."""
        layer = self.config.text.place_of(layer)
        q, k, v = qkv.view(len(qkv), -1, DIM).split([HEADS, 1, 1], dim=1)
        cache.write(layer, metadata.slot_mapping, k, v)
        return paged_attention(q.contiguous(), cache, layer, metadata, DIM**-0.5)


class HybridToy(Toy):
    """Its first layer is linear: a state, and the input before each token."""

    plan = replace(
        CONFIG,
        text=replace(
            CONFIG.text,
            kinds=("linear", "full"),
            linear=LinearAttention(key_heads=1, value_heads=HEADS, key_dim=DIM // 2, value_dim=DIM, kernel=2),
        ),
    )

    def mix(self, layer: int, qkv: torch.Tensor, cache: KVCache, metadata: AttentionMetadata) -> torch.Tensor:
        if self.config.text.kinds[layer] == "full":
            return super().mix(layer, qkv, cache, metadata)
        assert cache.states is not None
        assert metadata.state_slots is not None
        metadata = metadata.on_host()
        empty_beginners(cache.states, 0, metadata)
        inputs, states = cache.states.inputs[0], cache.states.recurrent[0]
        output = qkv.new_empty(len(qkv), HEADS, DIM)
        for run in runs_of(metadata):
            new, state_slots = qkv[run.rows, : 3 * DIM], metadata.state_slots[run.sequences]
            before = inputs[state_slots, 0] if run.single else torch.cat((inputs[state_slots, 0], new[:-1]))
            if run.sure:
                inputs[state_slots, 0] = new if run.single else new[-1:]
            new = new + 0.5 * before
            query, key, value = new.split([DIM // 2, DIM // 2, 2 * DIM], dim=1)
            beta = query[:, :HEADS].sigmoid()
            rule = Rule(query[:, None], key[:, None], value.view(-1, HEADS, DIM), -0.3 * beta, beta)
            output[run.rows] = (
                recur_at(rule, states, state_slots)
                if run.single
                else scan_at(rule, states, state_slots, run.sure)
            )
            if run.lands:
                keep(cache.states, 0, state_slots)
        return output


def picture(seed: int, h: int = 4, w: int = 6, t: int = 1) -> VisionItem:
    """An image of `t·h·w / 4` tokens."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(t * h * w, CONFIG.vision.patch_dim, generator=generator)
    return VisionItem(patches, (t, h, w), f"{seed}/{h}/{w}".encode())


def prompt_of(*parts: int | VisionItem) -> tuple[tuple[int, ...], tuple[VisionItem, ...]]:
    """Token ids with placeholders, and the items."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            t, h, w = part.grid_thw
            for _ in range(t):
                ids += [42, *[IMAGE] * (h * w // 4), 43]
    return tuple(ids), tuple(part for part in parts if isinstance(part, VisionItem))


def request(
    name: str, *parts: int | VisionItem, deadline: float | None = None, **sampling: object
) -> EngineRequest:
    """A request from token ids and pictures; further arguments are sampling parameters."""
    ids, vision = prompt_of(*parts)
    stops = frozenset(sampling.pop("stops", ()))  # type: ignore[call-overload]
    return EngineRequest(name, ids, SamplingParams(**{"max_tokens": 8, **sampling}), vision, stops, deadline)


def engine(model: Toy | None = None, **config: int) -> Engine:
    """An engine with room to spare, unless told otherwise."""
    sizes = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_batched_tokens": 64,
    }
    return Engine(model or Toy(), EngineConfig(**{**sizes, **config}))


def run(engine: Engine, *requests: EngineRequest, steps: int = 2000) -> dict[str, list[TokenOutput]]:
    """Add requests, step until idle with integrity checked at each step, and sort the outputs by request."""
    for item in requests:
        engine.add(item)
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work:
        steps -= 1
        assert steps, "the engine does not finish"
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def tokens(outputs: list[TokenOutput], choice: int = 0) -> list[int]:
    """The tokens of one choice."""
    return [o.token_id for o in outputs if o.choice == choice and o.token_id is not None]


@torch.inference_mode()
def oracle(model: Toy, item: EngineRequest, count: int) -> list[int]:
    """Greedy tokens by computing the whole sequence anew for each: no chunks, no cache, no engine."""
    merge = CONFIG.vision.spatial_merge_size
    grids = [v.grid_thw for v in item.vision]
    ids = list(item.prompt_ids)
    positions, delta = mrope_positions(ids, grids, placeholders=(IMAGE, VIDEO), merge_size=merge)
    rows = [i for i, token in enumerate(ids) if token == IMAGE]
    embeds = [model.encode_vision(v.patches.to(model.dtype), [v.grid_thw]) for v in item.vision]
    for _ in range(count):
        size = len(ids)
        more = torch.arange(len(item.prompt_ids), size) + delta
        cache = allocate(model, EngineConfig(num_blocks=1, block_size=size, max_num_seqs=1))
        batch = ForwardBatch(
            torch.tensor(ids),
            torch.cat([positions, more.expand(3, -1)], dim=1),
            AttentionMetadata(
                (size,),
                (size,),
                torch.arange(size),
                torch.zeros(1, 1, dtype=torch.int64),
                size,
                state_slots=torch.zeros(1, dtype=torch.int64),
            ),
            torch.tensor([size - 1]),
        )
        if rows:
            batch = replace(batch, vision_rows=torch.tensor(rows), vision_embeds=torch.cat(embeds))
        ids.append(int(model.forward(batch, cache).argmax()))
    return ids[len(item.prompt_ids) :]
