"""What our kernels take of cards that are not here: compiled for them without a GPU, for every kind of step.

    python benchmarks/other_cards.py [--cards "RTX 5060" "RTX 2080"] [--models NAME ...] [--formats fp8 int4]
                                     [--only gemm ...] [--kernels] [--out FILE]

Of each card, model and format every kernel that its steps, pictures and filters launch, with a KV cache in
the type that it computes in and with one in FP8, is compiled by Triton and NVIDIA's assembler, which come
with Triton. Printed are kernels, those that could not be compiled, and the most of: shared memory of a
program beside what that generation has, registers, and bytes that a thread keeps on its stack, which are in
slow memory: some hundred are registers put aside now and then, thousands a kernel in whose inner loop nothing
stays in registers. How fast they run is for a card to say. Exit code 1: some kernel can't be compiled, or
takes more shared memory than there is.
"""

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import triton

import machine
from snugvl.checkpoint.architecture import Fp8Blocks
from snugvl.checkpoint.catalogue import entries
from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.engine.precompile import network_from, outline_of, rehearse
from snugvl.layers.kernels.compiler.ahead_of_time import KernelLaunch, compile_all, compiled, dry_run
from snugvl.layers.kernels.device import Hardware
from snugvl.models.allocation import without_memory
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import LoadableNetwork

KIB = 1024
CARDS = {
    "RTX 2080": Hardware((7, 5), 46),
    "A100": Hardware((8, 0), 108),
    "RTX 3060": Hardware((8, 6), 28),
    "RTX 4060": Hardware((8, 9), 24),
    "H200": Hardware((9, 0), 132),
    "RTX 5060": Hardware((12, 0), 30),
}
# Shared memory that a program may have. Source: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability".
SHARED_BYTES = {
    (7, 5): 64 * KIB, (8, 0): 163 * KIB, (8, 6): 99 * KIB, (8, 9): 99 * KIB, (9, 0): 227 * KIB,
    (12, 0): 99 * KIB,
}  # fmt: skip
MODELS = ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct")
STORAGES = {
    "bf16": Storage("bf16"),
    "fp8": Storage("fp8"),
    "int8": Storage("int8", "int8"),
    "int6": Storage("int6", "int8"),
    "int5": Storage("int5", "int8"),
    "int4": Storage("int4", "int8"),
}
STEPS = EngineConfig(num_blocks=1, max_num_seqs=32, max_batched_tokens=2048)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One variant. `error`: why it could not be compiled, or ""."""

    name: str
    error: str = ""
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """What is compiled for what."""

    card: str
    model: str
    format: str


def network_of(case: Case) -> LoadableNetwork:
    """The model in its format, without memory, in the type that the card computes in."""
    entry = next((entry for entry in entries() if entry.name == case.model), None)
    if entry is None:
        sys.exit(f"{case.model} is not in the catalogue: snugvl plan lists it")
    network = without_memory(parse_config(entry.config, entry.name))
    network.to(torch.bfloat16 if CARDS[case.card].capability >= (8, 0) else torch.float16)
    storage = STORAGES[case.format]
    choose_formats(network, storage, Fp8Blocks(128, 128) if storage.layers == "fp8" else None)
    return network_from(outline_of(network, network.config))


def kernels_of(case: Case, only: tuple[str, ...]) -> list[Kernel]:
    """All of them or `only` those, compiled; in a process of its own."""
    hardware = CARDS[case.card]
    with torch.inference_mode(), dry_run(hardware) as launches:
        network = network_of(case)
        rehearse(network, STEPS)
        rehearse(network, replace(STEPS, kv_cache="fp8"))
    if unknown := set(only) - {launch.name for launch in launches}:
        sys.exit(
            f"no kernel {', '.join(sorted(unknown))} in these steps: --kernels without --only lists them"
        )
    return [
        Kernel(launch.name, f"{type(error).__name__}: {error}") if error is not None else taken(launch)
        for launch, error in compile_all(
            [each for each in launches if each.name in only or not only], hardware
        )
    ]


def taken(launch: KernelLaunch) -> Kernel:
    """What a kernel that has been compiled takes, by its binary."""
    binary = compiled(launch)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = USAGE.search(said.stdout + said.stderr)
    assert usage is not None, said.stdout
    return Kernel(launch.name, "", int(usage[1]), int(usage[2]), binary.metadata.shared)


def show(case: Case, found: list[Kernel], *, each: bool) -> bool:
    """A line for people; whether all of it can run."""
    limit = SHARED_BYTES[CARDS[case.card].capability]
    good = [kernel for kernel in found if not kernel.error]
    failed = [kernel for kernel in found if kernel.error]
    over = [kernel for kernel in good if kernel.shared_bytes > limit]
    shared, registers, stack = (
        max(good, key=lambda k, by=by: getattr(k, by), default=Kernel("none"))  # type: ignore[misc]
        for by in ("shared_bytes", "registers", "stack_bytes")
    )
    print(
        f"{case.card:<9} {case.model.rpartition('/')[2]:<24} {case.format:<5}{len(found):>4} kernels, "
        f"{len(failed)} failed; shared {shared.shared_bytes / KIB:3.0f} of {limit // KIB:3.0f} KiB "
        f"({shared.name}), registers {registers.registers}, stack {stack.stack_bytes:,} bytes ({stack.name})",
        flush=True,
    )
    for kernel in found if each else failed + over:
        print(
            f"    {kernel.name:<16}"
            + (
                kernel.error[:200]
                or f"{kernel.shared_bytes:>8,} bytes shared{kernel.registers:>5} registers"
                f"{kernel.stack_bytes:>7,} bytes of stack"
            )
        )
    return not (failed or over)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for card in arguments.cards:
        for model in arguments.models:
            for kind in arguments.formats:
                yield Case(card, model, kind)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS), metavar="CARD")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--formats", nargs="+", choices=STORAGES, default=list(STORAGES))
    parser.add_argument("--only", nargs="+", default=(), metavar="KERNEL")
    parser.add_argument("--kernels", action="store_true", help="a line for each kernel")
    parser.add_argument("--json", action="store_true", help="only all figures, as JSON")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels have no binary
    wanted, began = list(cases(arguments)), time.perf_counter()
    rows, well, compiling = [], True, partial(kernels_of, only=tuple(arguments.only))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        several = pool.map if len(wanted) > 1 else map  # a single one may have this process
        for case, found in zip(wanted, several(compiling, wanted), strict=True):
            rows.append(asdict(case) | {"kernels": [asdict(kernel) for kernel in found]})
            if not arguments.json:
                well = show(case, found, each=arguments.kernels) and well
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{time.perf_counter() - began:.0f} s")
    machine.save("other_cards", {"triton": triton.__version__, "results": rows}, arguments.out)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
