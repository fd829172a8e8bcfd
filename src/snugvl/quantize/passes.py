"""Passes over a network that is read layer by layer: they measure what rounding costs, and round.

What a matrix costs is measured, not guessed from its weights: a copy of the hidden states goes its own way
from the layer on in which that matrix alone has 4 bits, through all that comes after it, exact there, to the
distribution over the vocabulary. (What it costs in other widths is that times what they leave of the error's
square.) All copies go along in one reading of the files:

    exact           ─ layer 0 ─ layer 1 ─ … ─ head         reference
    qkv of layer 0   └ rounded ─ exact  ─ … ─ head         KL to the reference, nats a token
    o of layer 0     └ rounded ─ exact  ─ … ─ head

Then each matrix is rounded for the inputs that it gets behind all that are rounded before it, as GPTQ does
(https://arxiv.org/abs/2210.17323): a layer is passed once for each of its matrices. The exact network goes
along, so that a matrix makes up for a part of what those have lost (`rounding.py`). What a matrix adds to the
stream counts relative to the stream it is added to: a token whose stream is a thousand times larger (the
first of many models) would hide all others.

Before its matrices are measured or rounded a layer is folded: columns take a factor, and what makes their
inputs is divided by it (`rounding.py`), which changes nothing that the layer computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from snugvl.fidelity.distributions import Side, judge
from snugvl.fidelity.sweep import Sequences, Sweep, SweepSizes
from snugvl.layers.linear import Linear, RMSNorm
from snugvl.models.decoder import MLP, Layer
from snugvl.models.layered import LayeredNetwork
from snugvl.quantize.grids import Grid
from snugvl.quantize.rounding import Moments, Rounded, factors_of, rounded

Place = tuple[int, str]
"""A matrix: its layer, and its name in there."""
Parts = tuple[tuple[str, int], ...]
"""Names of the checkpoint's tensors that are a matrix' rows, and how many."""
INNER, OUTER = "mlp.gate_up_proj", "mlp.down_proj"
Factors = dict[str, torch.Tensor]
"""Divisors of the weights of the norm that a matrix reads, by the matrix' name in its layer."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of our network that can be rounded. `order`: its columns in the order in which they are
    stored, `[columns]`; None: as they are."""

    rows: int
    columns: int
    parts: Parts
    order: torch.Tensor | None = None

    @property
    def weights(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Rounds:
    """The matrices that are rounded, and how. `grids`: the grid of each matrix; `norms`: the checkpoint's
    name of the norm that each of these matrices alone reads."""

    grids: Mapping[Place, Grid]
    matrices: Mapping[Place, Matrix]
    norms: Mapping[Place, str]

    @property
    def replaced(self) -> set[str]:
        """The checkpoint's names of the matrices that are rounded."""
        return {name for matrix in self.matrices.values() for name, _ in matrix.parts}


def costs(
    network: LayeredNetwork,
    probe: Sequences,
    sizes: SweepSizes,
    grids: Mapping[Place, Sequence[Grid]],
    matrices: Mapping[Place, Matrix],
) -> dict[Place, dict[Grid, float]]:
    """Nats a token that each matrix costs if rounded alone, by grid: measured for the first, else derived."""
    shares: dict[Place, list[float]] = {}
    sweep = Sweep(network, [probe] * (1 + len(grids)), sizes)
    begun: list[Place] = []

    def visit(index: int, layer: Layer) -> None:
        sweep.advance(index, layer, range(1, 1 + len(begun)))
        mine = [place for place in grids if place[0] == index]
        _fold(layer, [name for _, name in mine])
        with _seen(layer, [name for _, name in mine]) as moments:
            sweep.advance(index, layer, [0], keep=False)
        for place in mine:
            matrix = _linear(layer, place[1])
            seen, exact = moments[place[1]], matrix.weight.clone()
            errors = []
            for grid in reversed(grids[place]):  # so that the first one is left there
                made = rounded(exact, grid, seen, compensate=False, order=matrices[place].order)
                values = made.values()
                matrix.weight.copy_(values)
                errors.append(float(((values - exact.float()).square() * seen.squares).sum()))
            shares[place] = [error / max(errors[-1], 1e-30) for error in reversed(errors)]
            begun.append(place)
            sweep.repeat(0, len(begun))
            sweep.advance(index, layer, [len(begun)])
            matrix.weight.copy_(exact)
        sweep.advance(index, layer, [0])

    states = [torch.cat(found) for found in sweep.run(visit)]
    reference, *others = states
    if not others:
        return {}
    right = Side(network, reference.repeat(len(others), 1))
    kl = judge(right, Side(network, torch.cat(others))).kl
    assert kl is not None
    means = kl.view(len(others), -1).mean(1).tolist()
    return {
        place: {grid: mean * share for grid, share in zip(grids[place], shares[place], strict=True)}
        for place, mean in zip(begun, means, strict=True)
    }


def quantise(
    network: LayeredNetwork,
    sequences: Sequence[Sequences],
    sizes: SweepSizes,
    rounds: Rounds,
    done: Callable[[int, dict[str, Rounded], Factors], None],
    *,
    compensate: bool,
) -> None:
    """Round all matrices that have a grid; `done` is called with each layer's results, by name in the
    layer.

    `compensate`: see `rounded`.
    """
    behind = range(len(sequences))  # rounded layers; behind exact ones the same follow
    sweep = Sweep(network, [*sequences, *sequences] if compensate else sequences, sizes)

    def visit(index: int, layer: Layer) -> None:
        mine = {name: grid for (number, name), grid in rounds.grids.items() if number == index}
        made: dict[str, Rounded] = {}
        exact: dict[str, torch.Tensor] = {}
        moments: dict[str, Moments] = {}
        factors = _fold(layer, list(mine))
        if not compensate:
            with _seen(layer, list(mine)) as moments:
                sweep.advance(index, layer, keep=False)
        names = _order(sweep, index, layer, list(mine)) if compensate else list(mine)
        for name in names:
            weight, order = _linear(layer, name).weight, rounds.matrices[index, name].order
            if compensate:
                moments[name] = _compared(sweep, sequences, index, layer, name, exact)
                exact[name] = weight.clone()
            made[name] = rounded(weight, mine[name], moments.pop(name), compensate=compensate, order=order)
            weight.copy_(made[name].values())
        if compensate:
            with _instead(layer, exact):
                sweep.advance(index, layer, [len(sequences) + number for number in behind])
        sweep.advance(index, layer, behind)
        done(index, made, factors)

    sweep.run(visit)


def fed(layer: Layer) -> dict[str, RMSNorm]:
    """The norms that one matrix alone reads, by that matrix' name.

    Norms that are stored as how far they are from 1 are left out: there a factor isn't exact.
    """
    found: dict[str, RMSNorm] = {}
    if not layer.linear:
        found["self_attn.qkv_proj"] = layer.input_layernorm
    if isinstance(layer.mlp, MLP):
        found[INNER] = layer.post_attention_layernorm
    return {name: norm for name, norm in found.items() if not norm.offset}


def _fold(layer: Layer, names: Sequence[str]) -> Factors:
    """Multiply columns of these matrices and divide what makes their inputs: the weights of a norm that
    feeds one alone, and those of the rows that SwiGLU multiplies with."""
    factors: Factors = {}
    for name, norm in fed(layer).items():
        if name in names:
            matrix, exact = _linear(layer, name), norm.weight.float()
            factors[name] = found = _exactly(exact, factors_of(matrix.weight))
            matrix.weight.mul_(found)
            norm.weight.copy_(exact / found)
    if {INNER, OUTER} <= set(names):
        inner, outer = (_linear(layer, name).weight for name in (INNER, OUTER))
        found = factors_of(outer).log2().round().exp2()  # powers of two: rows' codes stay as they would be
        outer.mul_(found)
        inner[len(found) :].div_(found[:, None])  # behind the gates
    return factors


def _exactly(norm: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Factors near these by which the weights of a norm can be divided so that bf16 has what comes out."""
    kept = (norm / factors).bfloat16().float()
    return torch.where(kept == 0, 1, norm / kept)


Visitor = Callable[[str, torch.Tensor, torch.Tensor | None], None]
"""Given a matrix' name, its inputs behind their norm, and what the product is added to."""


@contextmanager
def _seen(layer: Layer, names: Sequence[str]) -> Iterator[dict[str, Moments]]:
    """Collect moments of the inputs of these matrices within the block."""
    found = {name: Moments(each.columns, each.weight.device) for name, each in _linears(layer, names)}

    def add(name: str, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        found[name].add(x.float() * _share(residual))

    with _visited(layer, names, add):
        yield found


def _order(sweep: Sweep, index: int, layer: Layer, names: Sequence[str]) -> list[str]:
    """The names of matrices in the order in which the layer computes them."""
    found: dict[str, None] = {}
    with _visited(layer, names, lambda name, *_: found.setdefault(name)):
        sweep.advance(index, layer, [0], keep=False)
    return [*found, *(name for name in names if name not in found)]


def _compared(
    sweep: Sweep,
    sequences: Sequence[Sequences],
    index: int,
    layer: Layer,
    name: str,
    exact: Mapping[str, torch.Tensor],
) -> Moments:
    """Moments of a matrix' inputs behind all rounded matrices, this layer's included, and of its outputs'
    error.

    Sequences go one after the other, so that the exact inputs of only one are held.

    Args:
        exact: original weights of the layer's matrices that are rounded already.
    """
    matrix = _linear(layer, name)
    found = Moments(matrix.columns, matrix.weight.device, rows=matrix.rows)
    were: tuple[torch.Tensor, ...] = ()

    def keep(_: str, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        nonlocal were
        given = (x,) if residual is None else (x, residual)
        were = were or tuple(each.new_empty(tokens, each.shape[1]) for each in given)
        for place, values in zip(were, given, strict=True):
            place[sweep.computed] = values

    def add(_: str, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        inputs, *added = (each[sweep.computed] for each in were)
        lacking = linear(inputs - x, matrix.weight).float()
        if residual is not None:
            lacking += (added[0] - residual).float()
        share = _share(residual)
        found.add(x.float() * share, lacking * share)

    for number, sequence in enumerate(sequences):
        tokens, were = sequence.tokens, ()
        with _instead(layer, exact), _visited(layer, [name], keep):
            sweep.advance(index, layer, [len(sequences) + number], keep=False)
        with _visited(layer, [name], add):
            sweep.advance(index, layer, [number], keep=False)
    return found


@contextmanager
def _instead(layer: Layer, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the layer compute with these weights within the block."""
    linears = [(_linear(layer, name), weight) for name, weight in weights.items()]
    own = [each.weight.data for each, _ in linears]
    for each, weight in linears:
        each.weight.data = weight
    try:
        yield
    finally:
        for (each, _), weight in zip(linears, own, strict=True):
            each.weight.data = weight


@contextmanager
def _visited(layer: Layer, names: Sequence[str], visitor: Visitor) -> Iterator[None]:
    """Call `visitor` with the inputs of these matrices within the block."""

    def showing(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def show(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            norm = kwargs.get("norm")
            visitor(name, args[0] if norm is None else norm(args[0]), kwargs.get("residual"))

        return show

    hooks = [
        each.register_forward_pre_hook(showing(name), with_kwargs=True)
        for name, each in _linears(layer, names)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _share(residual: torch.Tensor | None) -> torch.Tensor | float:
    """Weight of each token: one over the root mean square of the stream that the product is added to."""
    if residual is None:
        return 1.0
    return residual.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).reciprocal()


def _linears(layer: Layer, names: Sequence[str]) -> list[tuple[str, Linear]]:
    return [(name, _linear(layer, name)) for name in names]


def _linear(layer: Layer, name: str) -> Linear:
    found = layer.get_submodule(name)
    assert isinstance(found, Linear)
    return found
