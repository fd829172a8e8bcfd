"""Kernels that steps of every family launch, and their machine code, compared between two revisions.

    PYTHONPATH=benchmarks python -m tests.layers.kernels.kernel_code [--out FILE] [--against FILE]

No GPU is needed: steps run on networks without memory, in the sizes of published ones, for a described card,
and Triton compiles for it. A step is 1, 4, 16, 64 or 300 tokens (of one sequence each, the last of one
alone), or a picture. Of every launch are kept, in order: kernel, grid, types and numbers of its arguments,
constants, and the digest of its PTX without line numbers. Steps that are equal in all of them give a card the
same work; what Python does between launches is another matter.

Printed: variants by kernel, with the most registers and the most bytes of spilled registers of one, and with
`--against` how many steps are equal and what differs. To compare with another commit check it out, and run
this script there with `PYTHONPATH` naming its `benchmarks` and its `src`.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else where a kernel stands in its file is part of its code

import torch
from triton.runtime import driver

from other_cards import CARDS, taken
from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine.memory import allocate
from snugvl.engine.precompile import _batch, _encode, network_from, outline_of
from snugvl.engine.predictor import hidden_states
from snugvl.layers.kernels.compiler import ahead_of_time
from snugvl.layers.kernels.compiler.ahead_of_time import KernelLaunch, compiled, dry_run
from snugvl.layers.kernels.compiler.launch import LaunchedKernel
from snugvl.layers.kernels.device import Hardware
from snugvl.layers.kv_cache import KVCache
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import LoadableNetwork, without_memory
from tests.engine.family_steps import models, network_in

FORMATS = {"bf16": "bf16", "fp8": "bf16", "int8": "int8", "int6": "int8", "int5": "int8", "int4": "int8"}
STEPS = {"1": (1,), "4": (1,) * 4, "16": (1,) * 16, "64": (1,) * 64, "300 of one": (300,)}
SIZES = EngineConfig(num_blocks=512, max_num_seqs=65)
PICTURE = (1, 16, 16)


@dataclass(frozen=True, slots=True)
class Work:
    """One launch, and in words what a card is given: kernel, grid, arguments, constants."""

    launch: KernelLaunch
    words: str


def works(step: Callable[[], object], hardware: Hardware) -> list[Work]:
    """Every launch of a step, in order, also those of variants that were launched before."""
    found: list[Work] = []
    plain = LaunchedKernel.__getitem__

    def noted(self: LaunchedKernel, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: object, **constants: object) -> None:
            kept = tuple(map(ahead_of_time._kept, values))
            made = KernelLaunch(self, kept, dict(constants))
            told = [_argument(value) for value in kept]
            found.append(Work(made, f"{made.name} {grid} {told} {sorted(constants.items(), key=str)}"))
            plain(self, grid)(*values, **constants)

        return launch

    LaunchedKernel.__getitem__ = noted  # type: ignore[method-assign]
    try:
        with torch.inference_mode(), dry_run(hardware):
            step()
    finally:
        LaunchedKernel.__getitem__ = plain  # type: ignore[method-assign]
    return found


def _argument(value: object) -> str:
    if isinstance(value, ahead_of_time.TensorAddress):
        return f"{value.dtype}{'' if value.address % 16 else ' aligned'}"
    return repr(value)


def networks(only: list[str]) -> Iterator[tuple[str, LoadableNetwork]]:
    """A network without memory for each model and format, and one with a GGUF's blocks."""
    for name, config in models().items():
        for form, head in FORMATS.items() if name in (only or [name]) else ():
            try:
                yield f"{name}, {form}", network_in(config, Storage(form, head))  # type: ignore[arg-type]
            except (AssertionError, ValueError) as error:  # its widths don't divide into groups
                print(f"left out: {name} in {form}: {error}")
    mix = import_module("tests.engine.serving_mix")  # not typed as strictly as this
    config = parse_config(mix.QWEN3_VL_2B, "config.json")
    network = without_memory(config)
    network.to(torch.bfloat16)
    mix.store_blocks(network)
    choose_formats(network, Storage("int4"), config.quantization)
    yield "Qwen3-VL-2B, Q4_K_M", network_from(outline_of(network, config))


def steps(hardware: Hardware, only: list[str]) -> Iterator[tuple[str, list[Work]]]:
    """Model, format and step, with its launches."""
    for name, network in networks(only):
        kept = allocate(network, SIZES)
        for rows, lengths in STEPS.items():
            yield f"{name}, {rows}", works(partial(_forward, network, lengths, kept), hardware)
        if network.tower is not None:
            yield f"{name}, a picture", works(partial(_encode, network, PICTURE), hardware)


def _forward(network: LoadableNetwork, lengths: tuple[int, ...], kept: KVCache) -> None:
    network.forward(_batch(lengths, kept, hidden_states(network, SIZES)), kept)


class Codes:
    """Digests of machine code, each variant compiled once.

    Attributes:
        figures: registers of a thread and bytes of its stack, by kernel and digest.
    """

    def __init__(self, hardware: Hardware) -> None:
        driver.set_active(ahead_of_time._DescribedDriver(hardware))
        self.figures: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        self._digests: dict[object, str] = {}

    def digest(self, launch: KernelLaunch) -> str:
        """Digest of the PTX of a launch's variant."""
        key = id(launch.kernel), launch.kernel.variant(launch.values, launch.constants)
        if key not in self._digests:
            code: str = compiled(launch).asm["ptx"]
            self._digests[key] = sha256(code.encode()).hexdigest()[:16]
            kernel = taken(launch)
            self.figures[launch.name][self._digests[key]] = kernel.registers, kernel.stack_bytes
        return self._digests[key]


def compare(now: dict[str, list[str]], before: dict[str, list[str]]) -> None:
    """Print how many steps are equal, and of each other one the first launch that isn't."""
    both = [name for name in now if name in before]
    unlike = [name for name in both if now[name] != before[name]]
    launches, equal = sum(len(now[name]) for name in both), len(both) - len(unlike)
    print(f"{equal} of {len(both)} steps are equal, launch by launch ({launches:,} launches)")
    for name in unlike:
        pairs = zip(now[name], before[name], strict=False)
        index, pair = next(((i, p) for i, p in enumerate(pairs) if p[0] != p[1]), (-1, ("", "")))
        print(f"  {name}: {len(before[name])} → {len(now[name])} launches; number {index + 1}:")
        print(*pair, sep="\n    ")
    for name in sorted(now.keys() ^ before.keys()):
        print(f"  only {'now' if name in now else 'before'}: {name}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--card", choices=CARDS, default="H200")
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    given = parser.parse_args()
    hardware, found = CARDS[given.card], dict[str, list[str]]()
    made = list(steps(hardware, given.models))
    codes = Codes(hardware)
    for name, launched in made:
        found[name] = [f"{work.words} {codes.digest(work.launch)}" for work in launched]
    print(f"{'kernel':<20}{'variants':>9}{'registers ≤':>13}{'stack bytes ≤':>15}")
    for kernel, variants in sorted(codes.figures.items()):
        most = [max(figure[index] for figure in variants.values()) for index in (0, 1)]
        print(f"{kernel:<20}{len(variants):>9}{most[0]:>13}{most[1]:>15}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if given.against:
        compare(found, json.loads(given.against.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
