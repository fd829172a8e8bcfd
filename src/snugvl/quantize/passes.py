"""Passes over a network that is read layer by layer: what rounding costs, and the rounding itself.

What a matrix costs is measured, not guessed from its weights: a copy of the hidden states goes its own way
from the layer on in which that matrix alone has 4 bits, through all that comes after it, exact there, to the
distribution over the vocabulary. (What it costs in other widths is that times what they leave of the error's
square.) All copies go along in one reading of the files:

    exact           ─ layer 0 ─ layer 1 ─ … ─ head         reference
    qkv of layer 0   └ rounded ─ exact  ─ … ─ head         KL to the reference, nats a token
    o of layer 0     └ rounded ─ exact  ─ … ─ head

Then each layer is rounded for the inputs that it gets behind the rounded layers before it, as GPTQ does
(https://arxiv.org/abs/2210.17323). What a matrix adds to the stream counts relative to the stream it is added
to: a token whose stream is a thousand times larger (the first of many models) would hide all others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from snugvl.fidelity.distributions import Side, judge
from snugvl.fidelity.sweep import Sequences, Sweep, SweepSizes
from snugvl.layers.linear import Linear
from snugvl.models.decoder import Layer
from snugvl.models.layered import LayeredNetwork
from snugvl.quantize.packed import Scheme
from snugvl.quantize.rounding import Moments, Rounded, rounded

JUDGED: Final = 32  # tokens whose distributions are compared
Place = tuple[int, str]
"""A matrix: its layer, and its name in there."""
Parts = tuple[tuple[str, int], ...]
"""Names of the checkpoint's tensors that are a matrix' rows, and how many."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One of our network's."""

    rows: int
    columns: int
    parts: Parts

    @property
    def weights(self) -> int:
        return self.rows * self.columns


def costs(
    network: LayeredNetwork,
    probe: Sequences,
    sizes: SweepSizes,
    schemes: Mapping[Place, Sequence[Scheme]],
    *,
    whole: bool,
) -> dict[Place, dict[Scheme, float]]:
    """Nats a token that each matrix costs, alone, in each of its schemes, the first of which is measured."""
    shares: dict[Place, list[float]] = {}
    sweep = Sweep(network, [probe] * (1 + len(schemes)), sizes)
    begun: list[Place] = []

    def visit(index: int, layer: Layer) -> None:
        sweep.advance(index, layer, range(1, 1 + len(begun)))
        mine = [place for place in schemes if place[0] == index]
        with _seen(layer, [name for _, name in mine]) as moments:
            sweep.advance(index, layer, [0], keep=False)
        for place in mine:
            linear = _linear(layer, place[1])
            seen, exact = moments[place[1]], linear.weight.clone()
            errors = []
            for bits, group in reversed(schemes[place]):  # so that the first one is left there
                values = rounded(exact, bits, group, seen, compensate=False, whole=whole).values()
                linear.weight.copy_(values)
                errors.append(float(((values - exact.float()).square() * seen.squares).sum()))
            shares[place] = [error / max(errors[-1], 1e-30) for error in reversed(errors)]
            begun.append(place)
            sweep.repeat(0, len(begun))
            sweep.advance(index, layer, [len(begun)])
            linear.weight.copy_(exact)
        sweep.advance(index, layer, [0])

    states = [torch.cat(found) for found in sweep.run(visit)]
    step = -(-len(states[0]) // JUDGED)
    reference, *others = (each[step - 1 :: step] for each in states)
    if not others:
        return {}
    right = Side(network, reference.repeat(len(others), 1))
    kl = judge(right, Side(network, torch.cat(others))).kl
    assert kl is not None
    means = kl.view(len(others), -1).mean(1).tolist()
    return {
        place: {scheme: mean * share for scheme, share in zip(schemes[place], shares[place], strict=True)}
        for place, mean in zip(begun, means, strict=True)
    }


def quantise(
    network: LayeredNetwork,
    sequences: Sequence[Sequences],
    sizes: SweepSizes,
    schemes: Mapping[Place, Scheme],
    done: Callable[[int, dict[str, Rounded]], None],
    *,
    compensate: bool,
    whole: bool,
) -> None:
    """Round all matrices that have a scheme; `done` is given each layer's, by their names in it.

    `compensate`, `whole`: see `rounded`.
    """
    sweep = Sweep(network, sequences, sizes)

    def visit(index: int, layer: Layer) -> None:
        mine = {name: scheme for (number, name), scheme in schemes.items() if number == index}
        with _seen(layer, list(mine)) as moments:
            sweep.advance(index, layer, keep=False)
        made = {}
        for name, (bits, group) in mine.items():
            weight = _linear(layer, name).weight
            seen = moments.pop(name)
            made[name] = rounded(weight, bits, group, seen, compensate=compensate, whole=whole)
            weight.copy_(made[name].values())
        sweep.advance(index, layer)
        done(index, made)

    sweep.run(visit)


@contextmanager
def _seen(layer: Layer, names: Sequence[str]) -> Iterator[dict[str, Moments]]:
    """Moments of what these matrices are given meanwhile."""
    found: dict[str, Moments] = {}
    hooks = []
    for name in names:
        linear = _linear(layer, name)
        found[name] = Moments(linear.columns, linear.weight.device)
        hooks.append(linear.register_forward_pre_hook(_adding_to(found[name]), with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _linear(layer: Layer, name: str) -> Linear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, Linear)
    return linear


def _adding_to(moments: Moments) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, norm, residual = args[0], kwargs.get("norm"), kwargs.get("residual")
        x = (x if norm is None else norm(x)).float()
        if residual is not None:
            x = x / residual.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        moments.add(x)

    return keep
