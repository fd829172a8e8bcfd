"""Plans the memory of a pass over a network before it begins, on the device and in host memory.

    always     context, kernels, small tensors, hidden states where there is room
    vision     the tower, what it computes with
    prefill    a decoder layer, keys and values of one layer and one sequence, a chunk's workspace
    decode     slices of both heads, and their logits

Memory for reading a part into its place is free before the part computes, so the larger of both counts. The
widest chunk that fits is taken, with as many readers as fit. Hidden states of all tokens wait on the
device if they fit, else in host memory, where encodings of pictures wait in any case. If there are too
many, the questions are divided: each part then reads the files once.

Parts of the network are counted as they are (they exist without memory), the rest by the formulas of the
planner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch

from snugvl.backends.place import TargetDevice
from snugvl.core.config import DEFAULT_BLOCK_SIZE
from snugvl.core.memory_kinds import Kind
from snugvl.core.sizes import format_size
from snugvl.errors import DoesNotFit
from snugvl.fidelity import distributions
from snugvl.fidelity.participant import Extent, Participant
from snugvl.fidelity.sweep import SweepSizes
from snugvl.models.layered import LayeredNetwork, part_bytes
from snugvl.planner.engines.native import footprint as native
from snugvl.planner.engines.native import hybrid
from snugvl.planner.footprint.kv import kv_bytes, state_bytes
from snugvl.planner.footprint.total import (
    PROCESS,
    PROCESS_BYTES,
    Component,
    Footprint,
    footprint_of,
    measured,
    predicted,
)
from snugvl.planner.footprint.vision import ImageSize, encoder_bytes_per_token, native_workspace

CHUNKS: Final = (2048, 1024, 512, 256, 128)  # tokens, the widest first
HOST_SHARE: Final = 2  # of free host memory beside a GPU, one part of so many is taken at most
STATE_COPIES: Final = 4  # a recurrent state, the scratch slot and two checkpoints


@dataclass(frozen=True, slots=True)
class QuestionMemory:
    """Sizes of one question, from which its memory in a pass follows.

    Attributes:
        extent: sizes of its prompt.
        answers: number of answers that are tried behind it.
        answer_tokens: tokens of each answer, at most.
    """

    extent: Extent
    answers: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        """Number of tokens whose hidden states wait for the next layer."""
        return self.extent.tokens + self.answers * self.answer_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.extent.tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The memory plan of a pass.

    Attributes:
        footprint: components of the device's memory.
        usable_bytes: bytes that may be used there.
        sizes: chunk and places of the computation.
        batches: numbers of the questions that are done together; each batch reads the files once.
        host_bytes: bytes of host memory, beside a GPU.
        readers: threads that read a part into its place.
    """

    footprint: Footprint
    usable_bytes: int
    sizes: SweepSizes
    batches: tuple[tuple[int, ...], ...]
    host_bytes: int
    readers: int


def plan_pass(
    side: Participant,
    network: LayeredNetwork,
    loads: Sequence[QuestionMemory],
    place: TargetDevice,
    more: Sequence[Component] = (),
) -> PassPlan:
    """The plan for a pass over `side` with these questions; `more`: components held meanwhile.

    Raises:
        DoesNotFit: not even the smallest chunk fits, or one question doesn't; with the numbers.
    """
    cpu, itemsize = place.device.type == "cpu", side.settings.itemsize
    hidden = side.config.text.hidden_size * itemsize
    encoded = 0 if side.facts.vision is None else encoder_bytes_per_token(side.inventory, itemsize)
    states = [load.tokens * hidden for load in loads]
    pictures = [load.extent.image_tokens * encoded for load in loads]
    both, none = [a + b for a, b in zip(states, pictures, strict=True)], [0] * len(loads)
    host = sum(both) if place.host_bytes is None else place.host_bytes // HOST_SHARE
    for chunk, readers in product(CHUNKS, (1,) if cpu else native.READERS):
        parts = [*_components(side, network, loads, place, chunk, readers), *more]
        room = place.usable_bytes - footprint_of(parts).total_bytes
        home = place.device if cpu or room >= sum(states) else torch.device("cpu")
        inside, beside = (both, none) if cpu else (states, pictures) if home == place.device else (none, both)
        waiting, limit = (inside, room) if cpu else (beside, host)
        if room < 0 or limit < max(waiting):
            continue
        batches = tuple(in_batches(waiting, limit))
        held, out = (max(sum(each[n] for n in batch) for batch in batches) for each in (inside, beside))
        why = "of every token that waits for its next layer" + (", and pictures" if cpu else "")
        parts.append(Component("hidden states", Kind.OTHER, held, why=why))
        sizes = SweepSizes(chunk, side.settings.kv, home)
        return PassPlan(footprint_of(parts), place.usable_bytes, sizes, batches, out, readers)
    found = footprint_of(parts)
    largest = max(found.counted, key=lambda part: part.nbytes)
    raise DoesNotFit(
        f"a pass over {side.capabilities.model} needs "
        f"{format_size(found.total_bytes + max(both))} at once, "
        f"the largest part being {largest.name} ({format_size(largest.nbytes)}); "
        f"{format_size(place.usable_bytes)} is available; free some, or give smaller pictures (--max-pixels)"
    )


def in_batches(sizes: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Indices of `sizes` in batches: as many in a row as fit into `room` together, one at least."""
    batch: tuple[int, ...] = ()
    for number, size in enumerate(sizes):
        if batch and sum(sizes[each] for each in batch) + size > room:
            yield batch
            batch = ()
        batch = (*batch, number)
    if batch:
        yield batch


def _components(
    side: Participant,
    network: LayeredNetwork,
    loads: Sequence[QuestionMemory],
    place: TargetDevice,
    chunk: int,
    readers: int,
) -> list[Component]:
    """All components but the hidden states that wait."""
    model, device = side.inventory, place.planned()
    longest = max(load.longest for load in loads)
    chunk = min(chunk, longest)
    settings = side.settings._replace(chunk=chunk, context=longest, sequences=1)
    itemsize, net = settings.itemsize, network.model
    parts = [
        measured(PROCESS, Kind.PROCESS, PROCESS_BYTES if device.cpu else 0),
        measured(f"{device.api} context and libraries", Kind.CONTEXT, device.context_bytes),
    ]
    if not device.cpu:
        parts += [
            measured(native.KERNELS, Kind.OTHER, native.KERNEL_BYTES),
            measured(native.LATE, Kind.KERNELS, native.LATE_BYTES),
            measured("cuBLAS workspace", Kind.WORKSPACE, device.cublas_bytes),
            measured("small tensors", Kind.OTHER, native.SMALL_TENSORS_BYTES),
        ]
    buffers = native.loading_bytes(model, settings, readers)
    if net.tower is not None and (patches := max(load.extent.patches for load in loads)):
        tokens = patches // model.facts.vision.merge_size**2 if model.facts.vision is not None else 0
        work = native_workspace(model, ImageSize(tokens, patches), itemsize, settings.vision_weights)
        parts.append(Component("vision tower", Kind.VISION, part_bytes(net.tower), "vision"))
        why = f"{patches:,} patches"
        parts.append(predicted("vision workspace", Kind.WORKSPACE, max(work, buffers), "vision", why=why))
    layer = max(part_bytes(each) for each in net.decoder.layers)
    cached = kv_bytes(model, settings, -(-longest // DEFAULT_BLOCK_SIZE) * DEFAULT_BLOCK_SIZE)
    cached = (cached - state_bytes(model, settings)) // max(side.config.text.kv_layers, 1)
    recurrent = STATE_COPIES * max((kind.state(itemsize) for kind, _ in model.kv_layers), default=0)
    work = _workspace(side, settings.chunk, longest, cpu=device.cpu)
    heads = distributions.workspace_bytes(side.config.text.hidden_size, side.config.text.vocab_size)
    return [
        *parts,
        Component("a decoder layer", Kind.WEIGHTS, layer, "prefill"),
        Component(
            "KV cache of a layer", Kind.CACHE, cached + recurrent, "prefill", why=f"{longest:,} tokens"
        ),
        predicted(
            "workspace", Kind.WORKSPACE, max(work, buffers), "prefill", why=f"{chunk:,} tokens of a chunk"
        ),
        Component(
            "slices of the heads", Kind.WEIGHTS, heads, "decode", why="a part of the vocabulary at a time"
        ),
    ]


def _workspace(side: Participant, chunk: int, longest: int, *, cpu: bool) -> int:
    """Workspace of a chunk in a layer, and of the rows that pictures bring, in bytes."""
    model = side.inventory
    settings = side.settings._replace(chunk=chunk, context=longest, sequences=1)
    attention = hybrid.attention_bytes(model, settings.itemsize, chunk, kernels=not cpu)
    pictures = chunk * side.config.text.hidden_size * settings.itemsize * 2
    if cpu:
        mask = chunk * longest * settings.itemsize  # of a chunk over a cached prefix
        layer = native.native_prefill(model, chunk, settings.itemsize) + mask
        return max(layer, attention) + native.widened(model, settings) + pictures
    each = chunk * native.prefill_per_token(model, settings)
    return max(each, attention) + native.slice_bytes(model, settings) + pictures
