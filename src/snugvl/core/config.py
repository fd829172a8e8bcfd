"""Frozen configuration of an engine; the plan makes it (`backends/native/allocation.py`)."""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from snugvl.errors import RequestError

KVFormat = Literal["bf16", "fp8"]
SpeculationName = Literal["auto", "off", "ngram", "mtp"]

DEFAULT_BLOCK_SIZE = 16
EXPERT_ROUNDS = 4  # in which a GPU fetches a step's experts from host memory, at most (`models.expert_cache`)
RECENT = 96  # tokens of each sequence whose hidden states are kept for its predictor (`engine.predictor`)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes that the engine allocates at start-up and never exceeds.

    Attributes:
        num_blocks: KV blocks in the pool.
        block_size: tokens per KV block.
        max_model_len: tokens of one sequence, prompt and answer together.
        max_num_seqs: sequences that run at the same time.
        max_batched_tokens: tokens of one step; longer prompts are prefilled in chunks of this.
        max_waiting: requests that may queue before `QueueFull`.
        prefix_cache: whether a prompt starts from blocks that earlier requests left (see
            `engine.sequence`); a model with recurrent states needs state snapshots for it.
        state_snapshots: copies of recurrent states that prompts may start from (`engine.snapshots`).
        kv_cache: format of keys and values; "bf16" stands for that of the activations, "fp8" takes a byte
            a value (see `layers.kv_cache`).
        encoder_cache_bytes: encodings of images that are kept beyond their request, for the next question.
        step_graph_bytes: memory of the CUDA graphs of steps with prompts and of small pictures
            (`engine.graphs.prefill`); 0 for none. They only save time: a plan has them where plenty
            stays free (`benchmarks/LOG.md#speed` says what they bring).
        step_graph_tokens: tokens of the largest step that has such a graph, where there are none of pictures;
            0: steps of any size, and pictures.
        skip_forced: whether tokens that a grammar forces are appended at once, without a step for each. The
            answers are the same; `benchmarks/masks.py` says what it brings.
        speculation: whether tokens are drafted, from prompt and answer ("ngram") or by the model's own
            multi-token predictor ("mtp"), and computed beside the newest one (see `engine.speculation`);
            "auto": by the predictor, if that is loaded, where it is seen to pay.
    """

    num_blocks: int
    block_size: int = DEFAULT_BLOCK_SIZE
    max_model_len: int = 8192
    max_num_seqs: int = 16
    max_batched_tokens: int = 2048
    max_waiting: int = 256
    prefix_cache: bool = True
    state_snapshots: int = 0
    encoder_cache_bytes: int = 0
    step_graph_bytes: int = 0
    step_graph_tokens: int = 0
    kv_cache: KVFormat = "bf16"
    skip_forced: bool = True
    speculation: SpeculationName = "off"

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value, least = each.name, getattr(self, each.name), 0 if each.default == 0 else 1
            if not isinstance(value, bool | str) and value < least:
                raise RequestError(f"{name} must be at least {least}, not {value}", field=name)
        for name, known in (("kv_cache", get_args(KVFormat)), ("speculation", get_args(SpeculationName))):
            if (value := getattr(self, name)) not in known:
                raise RequestError(f"{name} {value!r} is unknown; use {', '.join(known)}", field=name)
        if self.max_batched_tokens < self.max_num_seqs:
            raise RequestError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token a step",
                field="max_batched_tokens",
            )

    def snapshots_beside(self, slots: int) -> int:
        """State snapshots kept beside the states of `slots` sequences: fewer for fewer slots."""
        return self.state_snapshots * min(slots, self.max_num_seqs) // self.max_num_seqs

    @property
    def cache_tokens(self) -> int:
        """Number of tokens that the whole KV pool holds."""
        return self.num_blocks * self.block_size
