"""Figures of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Where the engine stands. Counters count since it was made.

    Attributes:
        num_blocks: of the KV cache now; `planned_blocks`: where no other program is short of memory.
        encoder_queries: images and videos that a prompt needed; `encoder_hits`: found encoded.
        shortages: steps that ran out of memory.
        kernel_compilations: kernels that were compiled; `graph_captures`: CUDA graphs that were recorded.
        recorded: CUDA graphs of steps with prompts and of pictures that there are now.
    """

    requests: int
    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    planned_blocks: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    steps: int
    computed_tokens: int
    generated_tokens: int
    items_encoded: int
    encoder_queries: int
    encoder_hits: int
    faults: int
    shortages: int
    kernel_compilations: int
    graph_captures: int
    recorded: int
