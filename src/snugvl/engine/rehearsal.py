"""The steps that an engine may make of its requests, one of each kind, for a dry run of their kernels.

What is chosen by how many tokens or sequences a step has is chosen by comparing with a power of two, or one
and a half times that. So steps of that many tokens, and of one more or less, use every kernel that any step
does: `tests/engine/test_rehearsal.py` holds it to that with a mix of requests.
"""

import torch

from snugvl.config import EngineConfig
from snugvl.engine.graphs.decode import choose, places
from snugvl.engine.memory.caches import allocate
from snugvl.engine.sampling.filters import support
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kv_cache import KVCache
from snugvl.models.batch import Batch, GridTHW, encoded
from snugvl.models.networks import LoadableNetwork
from snugvl.sampling import SamplingParams

SHORT = 64  # tokens of a prompt that comes alone seldom: a question with its template has more
# An image that the tower encodes in one chunk, one in several, and a video.
GRIDS: tuple[GridTHW, ...] = ((1, 16, 16), (1, 96, 96), (2, 16, 16))


def rehearse(network: LoadableNetwork, config: EngineConfig) -> None:
    """Run every kind of step, image and filter on a network without memory; within `dry_run`.

    What a person who asks about a picture waits for comes first, then texts, then what many at once need.
    Recorded steps (`step_graphs.py`) are filled up to sizes that are among these.
    """
    cache = allocate(network, config)
    prompts = edges(config.max_batched_tokens)
    decodes = edges(config.max_num_seqs)
    network.forward(_batch((prompts[-1],), cache), cache)
    for grid in GRIDS if network.tower is not None else ():
        _encode(network, grid)
    long, short = ([n for n in reversed(prompts) if (n > SHORT) is wanted] for wanted in (True, False))
    for lengths in ((1,), *((n,) for n in long), *((1,) * n for n in decodes), *((n,) for n in short)):
        network.forward(_batch(lengths, cache), cache)
    _around(network, cache)
    scores = torch.empty(2, network.config.text.vocab_size, device=network.device)
    support(scores, [SamplingParams(top_k=5), SamplingParams(top_p=0.5)])


def _around(network: LoadableNetwork, cache: KVCache) -> None:
    """What a decode graph does beside the network."""
    device, count = network.device, 2

    def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    lengths, tables = numbers(torch.int32, count), numbers(torch.int32, count, 1)
    places(lengths, numbers(torch.int64, count), tables, cache.block_size)
    logits = numbers(torch.float32, count, network.config.text.vocab_size)
    choose(logits, numbers(torch.int64, count), numbers(torch.int64, count), lengths)


def edges(most: int) -> list[int]:
    """Where what is chosen by a number may change, up to `most`."""
    found = {1, most}
    power = 1
    while power <= most:
        found |= {power, power + 1, 3 * power - 1, 3 * power}
        power *= 2
    return sorted(count for count in found if count <= most)


def _batch(lengths: tuple[int, ...], cache: KVCache) -> Batch:
    """Chunks of so many tokens, each the beginning and all of its sequence, as the runner makes them."""
    device, tokens, sequences = cache.storage.device, sum(lengths), len(lengths)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    width = -(-max(lengths) // cache.block_size)
    return Batch(
        input_ids=numbers(tokens),
        positions=numbers(3, tokens),
        attention=AttentionMetadata(
            query_lens=lengths,
            context_lens=lengths,
            slot_mapping=numbers(tokens),
            block_tables=numbers(sequences, width, dtype=torch.int32),
            block_size=cache.block_size,
            starts=numbers(sequences + 1, dtype=torch.int32),
            lengths=numbers(sequences, dtype=torch.int32),
            seats=None if cache.states is None else numbers(sequences),
        ),
        logit_rows=numbers(sequences),
    )


def _encode(network: LoadableNetwork, grid: GridTHW) -> None:
    vision = network.config.vision
    assert vision is not None, "a tower has a configuration"

    def read(start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, vision.patch_dim, dtype=network.dtype, device=network.device)

    encoded(network.encode_in_steps(read, grid))
