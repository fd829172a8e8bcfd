"""Compiling all kernels that an engine will need, ahead of time, in processes of their own.

    who loads the engine    its network's outline, its sizes and its hardware: a `CompileJob`
    native/kernel_processes  the network of that outline, without memory ─► a step, an image, a filter of each
                            kind in a dry run that writes launches down ─► each compiled into Triton's folder

What is chosen by how many tokens or sequences a step has is chosen by comparing with a power of two, or one
and a half times that. So steps of that many tokens, and of one more or less, use every kernel that any step
does: `tests/engine/test_precompile.py` holds it to that with a mix of requests.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from snugvl.checkpoint.architecture import ModelConfig
from snugvl.core.config import EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.batch import Numbers, likeliest, packed_batch
from snugvl.engine.graphs.decode import choose, places
from snugvl.engine.memory import allocate
from snugvl.engine.predictor import hidden_states
from snugvl.engine.sampling.filters import support
from snugvl.layers.ggml import TypedRows
from snugvl.layers.kernels.compiler.first_launch import read_triton
from snugvl.layers.kernels.device import Hardware, hardware_of
from snugvl.layers.kv_cache import KVCache, e4m3_bytes
from snugvl.layers.linear import Linear
from snugvl.layers.replaced import withdrawn, without
from snugvl.layers.weights import FormatName
from snugvl.models.batch import ForwardBatch, GridTHW, encoded
from snugvl.models.expert_cache import InPlace, experts_of
from snugvl.models.linear_attention import GatedDeltaNet
from snugvl.models.networks import LoadableNetwork, without_memory

SHORT = 64  # tokens of a prompt that comes alone seldom: a question with its template has more
# An image that the tower encodes in one chunk, one in several, and a video.
GRIDS: tuple[GridTHW, ...] = ((1, 16, 16), (1, 96, 96), (2, 16, 16))
BEFORE = 100  # tokens that each sequence has in the cache, and some more, where there is memory
MOST_BEFORE = BEFORE + 60


@dataclass(frozen=True, slots=True)
class Outline:
    """A network without its values.

    Attributes:
        tensors: dtype and shape of each parameter and buffer.
        formats: format of each linear layer, with the columns that share a scale, and the parts of a GGUF's.
        slots: where the decoder's experts are found by tables (`ExpertPlaces`), slots of a layer that the GPU
            gives itself, or 0; else None.
    """

    config: ModelConfig
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    formats: Mapping[str, tuple[FormatName, int, tuple[TypedRows, ...]]]
    slots: int | None = None


def outline_of(network: LoadableNetwork, config: ModelConfig) -> Outline:
    """The outline of a network with or without memory."""
    tensors = itertools.chain(network.named_parameters(remove_duplicate=False), network.named_buffers())
    linears = ((n, module) for n, module in network.named_modules() if isinstance(module, Linear))
    return Outline(
        config,
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors},
        {name: (linear.format, linear.group, linear.parts) for name, linear in linears},
        next((each.places.device_slots for each in experts_of(network) if each.places is not None), None),
    )


def network_from(outline: Outline) -> LoadableNetwork:
    """The network on "meta", with one decoder layer of each kind in place of all of them."""
    network = without_memory(outline.config)
    network.requires_grad_(False).eval()
    for name, module in network.named_modules():
        if isinstance(module, GatedDeltaNet) and f"{name}.in_proj" in outline.formats:
            module.join()
    for name, (kind, group, parts) in outline.formats.items():
        linear = network.get_submodule(name)
        assert isinstance(linear, Linear)
        linear.format, linear.group, linear.parts = kind, group, parts
    for name, (dtype, shape) in outline.tensors.items():
        owner, _, attribute = name.rpartition(".")
        module = network.get_submodule(owner)
        made = torch.empty(shape, dtype=dtype, device="meta")
        is_parameter = attribute in module._parameters
        setattr(module, attribute, nn.Parameter(made, requires_grad=False) if is_parameter else made)
    network.decoder.layers = nn.ModuleList(_kinds(network.decoder.layers))
    for experts in experts_of(network.decoder) if outline.slots is not None else ():
        experts.places = InPlace(experts, outline.slots or 0)
    return network


def _kinds(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The first of those that compute the same with other values."""
    found: dict[object, nn.Module] = {}
    for layer in layers:
        tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
        form = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors)
        traits = tuple(
            (getattr(each, "window", None), getattr(each, "parts", ())) for each in layer.modules()
        )
        found.setdefault((form, traits), layer)  # Q4_0 takes as many bytes as Q4_K
    return list(found.values())


@dataclass(frozen=True, slots=True)
class CompileJob:
    """An engine's kernels to compile: network, sizes, hardware, and kernels that are `withdrawn` there."""

    outline: Outline
    engine: EngineConfig
    hardware: Hardware
    withdrawn: tuple[str, ...] = ()


def compile_job_of(network: LoadableNetwork, config: EngineConfig, device: torch.device) -> CompileJob:
    """Needs of an engine on a GPU, without what differs from start to start and decides nothing here.

    `network`: with or without memory.
    """
    sizes = EngineConfig(
        num_blocks=1,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        kv_cache=config.kv_cache,
    )
    return CompileJob(outline_of(network, network.config), sizes, hardware_of(device), withdrawn())


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The result: number of kernels, and the errors of those that can't be compiled."""

    kernels: int
    failed: tuple[str, ...]


def read_compiler() -> None:
    """Import and read what `compile_kernels` needs, which takes seconds."""
    from snugvl.layers.kernels.compiler import ahead_of_time  # noqa: F401 (it needs triton, see below)

    read_triton(None)


def compile_kernels(
    job: CompileJob,
    number: int = 0,
    count: int = 1,
    first: Callable[[], object] = lambda: None,
    said: Callable[[str, str], None] = lambda *_: None,
) -> CompileReport:
    """Find out what kernels the engine's steps need, and compile them into Triton's folder.

    Those of share `number` of `count`: each has some of those that are needed first. The first of its own is
    compiled before it finds out what else there is, and would have it wait for Python's lock. `first` is
    called when its own of those that one person's first question needs are compiled; `said`: see `Compiler`.
    """
    from snugvl.layers.kernels.compiler.ahead_of_time import (
        Compiler,
        KernelLaunch,
        dry_run,
    )  # they need triton

    compiler, place = Compiler(job.hardware, said=said), itertools.count()

    def noted(launch: KernelLaunch) -> None:
        at = next(place)
        if at % count == number:
            compiling = compiler.add(launch)
            if at == number:
                compiling.result()

    with torch.inference_mode(), without(job.withdrawn), dry_run(job.hardware, noted):
        rehearse(network_from(job.outline), job.engine, lambda: compiler.then(first))
    done = list(compiler.results())
    failed = (f"{launch.name}: {error}" for launch, error in done if error is not None)
    return CompileReport(len(done), tuple(failed))


def rehearse(
    network: LoadableNetwork, config: EngineConfig, first: Callable[[], object] = lambda: None
) -> None:
    """Run every kind of step, image and filter on a network without memory, within `dry_run`; or with it.

    What a person who asks about a picture or, in a few words, without one waits for comes first; when that is
    done `first` is called. Then come other texts, then what many at once need.
    Steps that are CUDA graphs (`graphs/prefill.py`) are filled up to sizes that are among these.
    """
    cache, hidden = allocate(network, config), hidden_states(network, config)
    if network.device.type != "meta":
        _remember(cache)
    prompts = edges(config.max_batched_tokens)
    decodes = edges(config.max_num_seqs)
    ran = set[tuple[int, ...]]()

    def step(lengths: tuple[int, ...]) -> None:
        if lengths not in ran:  # again it launches nothing else
            ran.add(lengths)
            network.forward(_batch(lengths, cache, hidden), cache)

    step((prompts[-1],))
    _around(network, cache)
    for grid in GRIDS if network.tower is not None else ():
        _encode(network, grid)
    long, short = ([n for n in reversed(prompts) if (n > SHORT) is wanted] for wanted in (True, False))
    for tokens in (min(SHORT, prompts[-1]), 1):  # a question, and its answer
        step((tokens,))
    first()
    for lengths in (*((n,) for n in long), *((1,) * n for n in decodes), *((n,) for n in short)):
        step(lengths)
    for count in decodes if network.config.text.predictors else ():
        _draft(network, cache, count)
    _batch((2,), cache).attention.token_by_token(2)  # drafts
    scores = fresh((2, network.config.text.vocab_size), torch.float32, network.device)
    support(scores, [SamplingParams(top_k=5), SamplingParams(top_p=0.5)])


def _draft(network: LoadableNetwork, cache: KVCache, count: int) -> None:
    """Compute the predictor's drafts for `count` sequences; prompts are computed elsewhere."""
    batch = _batch((1,) * count, cache)
    hidden = fresh((count, network.config.text.hidden_size), network.dtype, network.device)
    attention = replace(batch.attention, starts=None)
    network.draft(network.predict(batch.input_ids, hidden, batch.positions, cache, attention))


def _around(network: LoadableNetwork, cache: KVCache) -> None:
    """Do the work of a decode graph beside the network."""
    device, count = network.device, 2

    def numbers(dtype: torch.dtype, *shape: int, below: int = 1) -> torch.Tensor:
        return fresh(shape, dtype, device, below)

    lengths = numbers(torch.int32, count, below=cache.block_size)
    tables = numbers(torch.int32, count, 1, below=cache.num_blocks)
    places(lengths, numbers(torch.int64, count, below=9), tables, cache.block_size)
    vocab = network.config.text.vocab_size
    logits = numbers(torch.float32, count, vocab)
    bits = numbers(torch.int32, count, (vocab + 31) // 32, below=1 << 31)
    for allowed in (None, bits):
        choose(logits, numbers(torch.int64, count), numbers(torch.int64, count), lengths, allowed)
    likeliest(logits, bits)


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device, below: int = 1) -> torch.Tensor:
    """Random numbers; whole ones from 0 to less than `below`. Without values on "meta"."""
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.randint(below, tuple(shape), dtype=dtype, device=device)


def edges(most: int) -> list[int]:
    """Where what is chosen by a number may change, up to `most`."""
    found = {1, most}
    power = 1
    while power <= most:
        found |= {power, power + 1, 3 * power - 1, 3 * power}
        power *= 2
    return sorted(count for count in found if count <= most)


def _batch(lengths: tuple[int, ...], cache: KVCache, hidden: torch.Tensor | None = None) -> ForwardBatch:
    """Batch of whole sequences of these lengths in tokens, as the runner makes it.

    `hidden`: hidden states that a draft model has (`DraftBatch`).
    """
    device, tokens, sequences = cache.storage.device, sum(lengths), len(lengths)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    width = -(-max(lengths) // cache.block_size)
    parts = Numbers(
        ids=numbers(tokens),
        positions=numbers(3, tokens),
        slots=numbers(tokens),
        logit_rows=numbers(sequences),
        pictured=numbers(0),
        tables=numbers(sequences, width, dtype=torch.int32),
        state_slots=numbers(sequences),
        landings=numbers(sequences),
        unsure=numbers(sequences),
        hidden_rows=numbers(tokens),
        following=numbers(tokens),
        starts=numbers(sequences + 1, dtype=torch.int32),
        lengths=numbers(sequences, dtype=torch.int32),
    )
    if device.type == "meta":
        return packed_batch(parts, cache, lengths, lengths, hidden=hidden)
    contexts = tuple(new + before for new, before in zip(lengths, befores(sequences), strict=True))
    parts = _with_values(parts, lengths, contexts, cache, 1 if hidden is None else len(hidden))
    return packed_batch(parts, cache, lengths, contexts, hidden=hidden)


def _remember(cache: KVCache) -> None:
    """Fill a cache with random values, as if there were tokens before."""
    values = fresh(cache.storage.shape[1:], torch.float32, cache.storage.device)
    cache.storage.copy_(e4m3_bytes(values) if cache.fp8 else values)
    if cache.states is not None:
        cache.states.recurrent.normal_(0, 0.1)
        cache.states.inputs.normal_()


def befores(sequences: int) -> list[int]:
    """Made-up numbers of tokens in the cache of each of `sequences` sequences, in a run with memory."""
    return [BEFORE + 7 * sequence % (MOST_BEFORE - BEFORE) for sequence in range(sequences)]


def _with_values(
    parts: Numbers[torch.Tensor],
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    cache: KVCache,
    kept: int,
) -> Numbers[torch.Tensor]:
    """Attention's metadata of a step, as the runner makes it: every sequence in blocks of its own."""
    device, size = parts.ids.device, cache.block_size
    blocks = [-(-context // size) for context in contexts]
    firsts = [0, *itertools.accumulate(blocks)]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    places, starts = [], [0, *itertools.accumulate(lengths)]
    for sequence, (new, context) in enumerate(zip(lengths, contexts, strict=True)):
        tables[sequence, : blocks[sequence]] = torch.arange(firsts[sequence], firsts[sequence + 1])
        places.append(torch.arange(context - new, context) + firsts[sequence] * size)
    slots = torch.cat(places).to(device)
    tokens = torch.arange(len(slots), device=device)
    alone = torch.arange(len(lengths), device=device)
    return parts._replace(
        ids=tokens % 97,
        positions=(tokens + BEFORE).expand(3, -1).contiguous(),
        slots=slots,
        logit_rows=torch.tensor(starts[1:], device=device) - 1,
        tables=tables,
        state_slots=alone,
        landings=torch.zeros_like(alone),
        unsure=torch.zeros_like(alone),
        hidden_rows=tokens % kept,
        following=tokens % 89,
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
    )


def _encode(network: LoadableNetwork, grid: GridTHW) -> None:
    vision = network.config.vision
    assert vision is not None, "a tower has a configuration"

    def read(start: int, end: int) -> torch.Tensor:
        return fresh((end - start, vision.patch_dim), network.dtype, network.device)

    encoded(network.encode_in_steps(read, grid))
