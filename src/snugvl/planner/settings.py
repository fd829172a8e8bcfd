"""Settings of a run: every choice that changes a byte of memory, as one frozen value."""

from typing import Final, Literal, NamedTuple, get_args

from snugvl.core.config import KVFormat as KVFormat
from snugvl.core.formats import Precision
from snugvl.core.options import Engine as Engine
from snugvl.planner.engines import PREFERRED as PREFERRED
from snugvl.planner.engines import rules_of

HeadFormat = Literal["bf16", "int8"]
VisionFormat = Literal["bf16", "int8"]
Placement = Literal["gpu", "streamed", "cpu"]

ENGINES: Final[tuple[Engine, ...]] = get_args(Engine)
BLOCK_TOKENS: Final = 16  # tokens of a KV block, ours and vLLM's
DEFAULT_CHUNK: Final = 2048  # tokens of one step: EngineConfig's default, and vLLM's server below 70 GB
DEFAULT_SEQUENCES: Final = 16  # EngineConfig's max_num_seqs


class Settings(NamedTuple):
    """One way to run a model.

    Attributes:
        weights: precision of the matrices of the decoder's layers in memory; everything else stays bf16.
        head: format of embedding and lm_head; our engine alone can have it other than bf16.
        kv: format of keys and values; "bf16" stands for that of the activations.
        float32: whether cache, activations and all that isn't quantised are float32, as with "fp32" weights.
        context: tokens of one sequence: prompt, image tokens and answer.
        max_pixels: larger images are scaled down to this many pixels; None for a model without images.
        images: images of one request.
        concurrency: requests that run at the same time, each with its whole context.
        pool_tokens: tokens of our own engine's KV pool, which all requests share; 0: `concurrency` contexts.
        chunk: most tokens of one step (`max_num_batched_tokens` of vLLM).
        sequences: most sequences that run at once, whatever their contexts (our engine, vLLM).
        vision: where the vision tower's weights are: on the GPU, streamed block by block (our engine alone),
            on the CPU (transformers and llama.cpp).
        embedding: where the embedding is: on the GPU, or in host memory, where the GPU reads rows of it (our
            engine alone).
        offloaded: decoder layers, the last ones, whose weights stay in host memory and cross to the GPU
            for every forward pass (transformers), or are computed there (llama.cpp).
        host_experts: decoder layers, the first ones, whose experts stay in host memory (llama.cpp alone).
        expert_slots: experts of each layer that have a copy on the GPU, all being in host memory (our engine
            alone); None: all are on the GPU.
        page_locked: whether weights in host memory are page-locked, where a GPU reads them by itself (our
            engine alone); see `with_host_memory`.
        on_gpu: whether there is a GPU (used by llama.cpp alone, whose layers' places follow from it).
        tensor_parallel, pipeline_parallel: GPUs that share each layer, and groups of layers.
        data_parallel: copies of the model, each with its share of the requests.
        language_only: whether a model that sees is loaded without its vision tower.
        vision_weights: format of the vision tower's matrices; our engine alone can have it other than bf16.
        eager: whether there are no CUDA graphs (vLLM's `--enforce-eager`).
        step_graphs: whether there are CUDA graphs also of steps with prompts and of small pictures (our
            engine alone).
        draft_graphs: whether there are CUDA graphs of the predictor's drafts and of small steps with them
            alone (our engine alone): where there is no room for `step_graphs`.
        encoder_cache_bytes: bytes of encodings that our engine keeps for the next question about a picture.
        state_snapshots: recurrent states that our engine keeps for the next turn; a model that has such
            states, and keeps none, goes without the prefix cache.
        predictor: whether the checkpoint's multi-token predictor is loaded (our engine alone).
    """

    engine: Engine
    weights: Precision = "bf16"
    head: HeadFormat = "bf16"
    kv: KVFormat = "bf16"
    context: int = 8192
    max_pixels: int | None = None
    images: int = 1
    concurrency: int = 1
    chunk: int = DEFAULT_CHUNK
    vision: Placement = "gpu"
    embedding: Placement = "gpu"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    eager: bool = True
    sequences: int = DEFAULT_SEQUENCES
    float32: bool = False
    offloaded: int = 0
    data_parallel: int = 1
    language_only: bool = False
    vision_weights: VisionFormat = "bf16"
    pool_tokens: int = 0
    step_graphs: bool = False
    draft_graphs: bool = False
    encoder_cache_bytes: int = 0
    state_snapshots: int = 0
    predictor: bool = False
    host_experts: int = 0
    expert_slots: int | None = None
    page_locked: bool = True
    on_gpu: bool = True

    def with_host_memory(self, *, page_locked: bool) -> "Settings":
        """The settings on a system that gives page-locked memory for weights, or none.

        Steps with experts in host memory are CUDA graphs only where the GPU reads them by itself.
        """
        eager = self.eager if self.expert_slots is None else not page_locked
        if (page_locked, eager) == (self.page_locked, self.eager):
            return self
        return self._replace(page_locked=page_locked, eager=eager)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens of our engine's KV pool, in whole blocks."""
        each = -(-self.context // BLOCK_TOKENS) * BLOCK_TOKENS
        return max(self.pool_tokens // BLOCK_TOKENS * BLOCK_TOKENS, each * self.concurrency)

    @property
    def kv_blocks(self) -> int:
        """Number of blocks of our engine's KV pool."""
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def itemsize(self) -> int:
        """Bytes of an activation, and of a weight that isn't quantised."""
        return 4 if self.float32 or self.weights == "fp32" else 2

    @property
    def kv_itemsize(self) -> int:
        """Bytes of a cached value."""
        return 1 if self.kv == "fp8" else self.itemsize

    @property
    def kv_name(self) -> str:
        """Format of the cache as its engine calls it: that of the activations, or eight bits."""
        return rules_of(self.engine).kv_name(self)

    @property
    def weights_name(self) -> str:
        """Formats of the weights in words: "int4 (embedding, lm_head and vision tower in int8)"."""
        tower = self.vision_weights != "bf16"
        if self.head == "bf16":
            return f"{self.weights} (vision tower in int8)" if tower else self.weights
        parts = "embedding, lm_head and vision tower" if tower else "embedding and lm_head"
        return f"{self.weights} ({parts} {'too' if self.head == self.weights else f'in {self.head}'})"

    @property
    def gpus(self) -> int:
        """Number of GPUs that all copies of the model take."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def concurrency_of_copy(self) -> int:
        """Requests that one copy of the model runs at the same time."""
        return -(-self.concurrency // self.data_parallel)
