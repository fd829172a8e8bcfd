"""Run by `compiled.py` where kernels are not interpreted.

Engines serve a mix of requests on networks without memory, in the shapes of real ones; what they would
launch on an H200 is compared with what a rehearsal finds. So are steps by CUDA graphs, which are filled up.
"""

import random
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch

from snugvl.backends.process.child import WARM_TOKENS
from snugvl.checkpoint.architecture import ModelConfig
from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig, KVFormat
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.cache import Pool, Work
from snugvl.engine.graphs.decode import SIZES, choose, places
from snugvl.engine.memory import allocate
from snugvl.engine.precompile import _batch, network_from, outline_of, rehearse
from snugvl.engine.request import EngineRequest, VisionItem
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.ggml import GgmlType
from snugvl.layers.kernels.compiler.ahead_of_time import KernelLaunch, dry_run
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import ForwardBatch, GridTHW, PatchReader
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import LoadableNetwork, without_memory

H200 = Hardware((9, 0), 132)
IMAGE = 4000
CROWD = 36
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
VISION = {
    "depth": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN3_VL_2B: dict[str, Any] = {  # but for its number of layers and its vocabulary
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": True,
    "image_token_id": IMAGE,
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        "hidden_act": "silu",
    },
    "vision_config": {**VISION, "out_hidden_size": 2048, "deepstack_visual_indexes": [0]},
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "image_token_id": IMAGE,
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "hidden_act": "silu",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
    "vision_config": {**VISION, "out_hidden_size": 1024},
}
MIXTURE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
QWEN3_5_MOE = QWEN3_5 | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": QWEN3_5["text_config"] | MIXTURE | {"shared_expert_intermediate_size": 512},
}
QWEN3_VL_MOE = QWEN3_VL_2B | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": QWEN3_VL_2B["text_config"] | MIXTURE,
}
CASES: dict[str, tuple[dict[str, Any], Storage, KVFormat]] = {
    "2B-FP8": (QWEN3_VL_2B | {"quantization_config": FP8}, Storage("fp8"), "bf16"),
    "2B in 4 bits": (QWEN3_VL_2B, Storage("int4", "int8", tower="int8"), "fp8"),
    "Qwen3.5": (QWEN3_5, Storage("int6"), "bf16"),
    "Qwen3.5, mixture": (QWEN3_5_MOE, Storage("int4", expert_slots=40), "bf16"),
    "2B as GGUF": (QWEN3_VL_2B | {"blocks": True}, Storage("int4"), "bf16"),
    "mixture as GGUF": (QWEN3_VL_MOE | {"blocks": True}, Storage("int4"), "bf16"),
}
KINDS: tuple[tuple[GgmlType, GgmlType], ...] = (("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"))


class Stage:
    """A network for an engine on the CPU: it lets one without memory do the work, and answers with zeros."""

    device, dtype = torch.device("cpu"), torch.bfloat16
    expert_cache = None

    def __init__(self, network: LoadableNetwork, config: EngineConfig) -> None:
        text = network.config.text
        linear = None if text.linear is None else replace(text.linear, value_dim=1, key_dim=1)
        # For the engine's own cache, which nobody reads.
        self.config: ModelConfig = replace(
            network.config, text=replace(text, num_kv_heads=1, head_dim=1, linear=linear)
        )
        self._network = network
        self._cache = allocate(network, replace(config, num_blocks=1))

    @property
    def tower_is_capturable(self) -> bool:
        return self._network.tower_is_capturable

    @property
    def capturable_tokens(self) -> int | None:
        return self._network.capturable_tokens

    def encode_in_steps(self, read: PatchReader, grid: GridTHW) -> Generator[int, None, torch.Tensor]:
        def shape_only(start: int, end: int) -> torch.Tensor:
            return without_values(read(start, end))

        made = yield from self._network.encode_in_steps(shape_only, grid)
        return torch.zeros(made.shape, dtype=made.dtype)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        assert batch.logit_rows is not None
        if batch.attention.decodes and len(batch.input_ids) <= SIZES[-1]:
            logits = self._as_in_a_graph(next(size for size in SIZES if size >= len(batch.input_ids)), batch)
        else:
            logits = self._network.forward(as_on_a_gpu(batch), self._cache)
        return torch.zeros(len(batch.logit_rows), logits.shape[1])

    def _as_in_a_graph(self, size: int, batch: ForwardBatch) -> torch.Tensor:
        """Filled up, with tables as wide as a sequence may be long, and what a graph does around it."""

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        tables, lengths = (numbers(size, *rest, dtype=torch.int32) for rest in ((512,), ()))
        positions, slots = places(lengths, numbers(size), tables, batch.attention.block_size)
        attention = replace(
            batch.attention,
            query_lens=(1,) * size,
            context_lens=(1,) * size,
            slot_mapping=slots,
            block_tables=tables,
            starts=None,
            lengths=lengths,
            state_slots=numbers(size) if batch.attention.state_slots is not None else None,
        )
        logits = self._network.forward(ForwardBatch(numbers(size), positions, attention, None), self._cache)
        masks = numbers(size, -(-logits.shape[1] // 32), dtype=torch.int32)
        for allowed in (None, masks):
            choose(logits, numbers(size), numbers(size), lengths, allowed)
        return logits


class Again:
    """A capturer whose graphs do the work again."""

    def capture(self, work: Work, pool: Pool) -> Work:
        return work

    def synchronize(self) -> None:
        pass

    def drop_pool(self, pool: Pool) -> None:
        pass


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """As long, and as far from the beginning of its memory."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(size, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def as_on_a_gpu(batch: ForwardBatch) -> ForwardBatch:
    def moved(value: Any) -> Any:
        return without_values(value) if isinstance(value, torch.Tensor) else value

    attention = batch.attention.on_device()
    names = AttentionMetadata.__dataclass_fields__
    attention = replace(attention, **{name: moved(getattr(attention, name)) for name in names})
    numbers = {name: moved(getattr(batch, name)) for name in ForwardBatch.__dataclass_fields__}
    return ForwardBatch(**numbers | {"attention": attention})


def request(name: str, words: int, answer: int, grid: GridTHW | None) -> EngineRequest:
    ids = [random.randrange(3000) for _ in range(words)]
    vision = []
    if grid is not None:
        ids += [IMAGE] * (grid[1] * grid[2] // 4)
        patches = torch.zeros(grid[1] * grid[2], 1536)
        vision = [VisionItem(patches, grid, random.randbytes(8))]
    sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    return EngineRequest(name, tuple(ids), sampling, tuple(vision))


def serve(engine: Engine, requests: Sequence[EngineRequest]) -> int:
    """All of them, some arriving together and some later; how many ran at once at most."""
    left, most = list(requests), 0
    while left or engine.has_work:
        for _ in range(random.choice((0, 0, 1, 2, 9)) if most else CROWD):
            if left:
                engine.add(left.pop())
        for output in engine.step():
            assert output.error is None, output.error
        most = max(most, engine.stats.running)
    return most


def serve_captured(stage: Stage, sizes: EngineConfig) -> None:
    """Another mix, by CUDA graphs of what comes again."""
    engine = Engine(stage, sizes)
    graphs = engine._runner.graph_cache
    graphs.capturer, graphs.nbytes = Again(), 1 << 20
    graphs.start()
    engine._runner.use_spare_graphs()
    serve(engine, mix())
    assert graphs.on
    assert graphs.replays > 0


def mix() -> list[EngineRequest]:
    """Prompts of 1 to 4,096 tokens, half of them with a picture; the last ones, short, come at once."""
    made = []
    for index in range(8):
        grid = (1, 2 * random.randrange(1, 24), 2 * random.randrange(1, 24)) if index % 2 == 0 else None
        words = int(2 ** random.uniform(0, 12)) if index else 4096
        made.append(request(f"mixed {index}", words, random.randrange(1, 5), grid))
    return made + [request(f"short {index}", 1 + index % 6, 3 + index % 6, None) for index in range(CROWD)]


def store_blocks(network: LoadableNetwork) -> None:
    """As a GGUF has them: values and second products of some layers are finer, and so is the embedding."""
    network.decoder.embed_tokens.store_blocks([("Q6_K", 4096)])
    layers: Any = network.decoder.layers
    for index, layer in enumerate(layers):
        most, finer = KINDS[index]
        layer.self_attn.qkv_proj.store_blocks([(most, 3072), (finer, 1024)])
        layer.self_attn.o_proj.store_blocks([(most, 2048)])
        mlp = getattr(layer.mlp, "experts", layer.mlp)
        mlp.gate_up_proj.store_blocks([(most, mlp.gate_up_proj.rows)])
        mlp.down_proj.store_blocks([(finer, mlp.down_proj.rows)])


def late(network: LoadableNetwork, sizes: EngineConfig) -> list[str]:
    """Kernels of the prompt that a process warms up with, but for those of the longest, compiled first."""
    with torch.inference_mode(), dry_run(H200) as launches:
        cache = allocate(network, sizes)
        network.forward(_batch((sizes.max_batched_tokens,), cache), cache)
        first = len(launches)
        network.forward(_batch((WARM_TOKENS,), cache), cache)
    return [launch.name for launch in launches[first:]]


def rehearsed(
    values: dict[str, Any], storage: Storage, kv: KVFormat
) -> tuple[list[KernelLaunch], list[KernelLaunch], list[str], int]:
    """Launches that a rehearsal finds, those of the mix beyond them, those that are needed before and
    compiled late, and how many requests ran at once.
    """
    config = parse_config(values, "config.json")
    network = without_memory(config)
    network.to(torch.bfloat16)
    if values.get("blocks"):
        store_blocks(network)
    choose_formats(network, storage, config.quantization)
    network = network_from(replace(outline_of(network, config), slots=storage.expert_slots))
    sizes = EngineConfig(num_blocks=8192, max_num_seqs=33, kv_cache=kv, prefix_cache=False)
    tardy = late(network, sizes)
    with torch.inference_mode(), dry_run(H200) as launches:
        rehearse(network, sizes)
        known = len(launches)
        stage = Stage(network, sizes)
        most = serve(Engine(stage, sizes), mix())
        if config.text.linear is None:
            serve_captured(stage, sizes)
    return launches[:known], launches[known:], tardy, most


def found() -> dict[str, Any]:
    """By network: the kernels of the rehearsal, those launched besides, and those that came late."""
    random.seed(5)
    mixes = {}
    for name, case in CASES.items():
        known, beyond, tardy, most = rehearsed(*case)
        mixes[name] = {
            "known": Counter(launch.name for launch in known),
            "beyond": [str((launch.name, launch.values, launch.constants)) for launch in beyond],
            "late": tardy,
        }
        assert most > SIZES[-1], f"at most {most} requests ran at once"
    return mixes
