"""Our kernels on cards that are not here: compiled for them without a GPU, and held in a table.

    PYTHONPATH=. python benchmarks/other_cards.py                    compile what the table lacks
    PYTHONPATH=. python benchmarks/other_cards.py --check            is the table of these sources?

For each card, networks without memory in the sizes of published ones (`NETWORKS`) make every kind of step,
picture and filter, in all formats, in the type that the card computes in, with a KV cache in it and in FP8;
what they launch is written down. Of each kernel and format one variant is compiled, that with the largest
tiles; with `--all` every one. That is done by the Triton that is imported, and by NVIDIA's assembler,
which comes with it: for another version put its folder first in `PYTHONPATH`. What the table has of the same
source and variant isn't compiled again, so a change costs what has changed.

`results/other_cards.json` has each variant: its form, registers, bytes of shared memory, bytes of a thread's
stack, instructions that write or read the stack. `results/other_cards.txt` is the table for people, its head
the worst of each card. A stack is in slow memory: some hundred bytes are registers put aside now and then,
thousands a kernel in whose inner loop nothing stays in registers; beyond 1 KiB the driver takes memory for it
from the whole card (`hardware/calibration.py`). How fast they run is for a card to say. Exit code 1: a kernel
can't be compiled or takes more than a card has, or the table is of other sources.
"""

import argparse
import ast
import inspect
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels have no binary

import torch
import triton
from triton.runtime import driver

import machine
import snugvl.layers.kernels
from snugvl.checkpoint.architecture import Fp8Blocks, ModelConfig
from snugvl.checkpoint.catalogue import entries
from snugvl.checkpoint.families import parse_config
from snugvl.core.config import EngineConfig
from snugvl.core.formats import FEW_BITS, FORMATS
from snugvl.engine.precompile import network_from, outline_of, rehearse
from snugvl.hardware.calibration import STACK_BYTES, local_memory_bytes
from snugvl.layers.ggml import LAYOUTS
from snugvl.layers.kernels.compiler.ahead_of_time import (
    KernelLaunch,
    TensorAddress,
    _DescribedDriver,
    compiled,
    dry_run,
)
from snugvl.layers.kernels.compiler.launch import LaunchedKernel, trait
from snugvl.layers.kernels.device import TENSOR_CORES, Hardware
from snugvl.layers.kernels.products.ggml import TYPES
from snugvl.layers.linear import Linear
from snugvl.layers.weights import to_few_bits
from snugvl.models.linear_attention import join_projections
from snugvl.models.loader import Storage, choose_formats
from snugvl.models.networks import LoadableNetwork, without_memory

KIB = 1024
BY_TRITON = ("PAIR", "FLIP")  # constants that Triton's version decides
SHORT = 6  # digits of a digest of what is launched
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
BF16, FP8, INT8 = Storage("bf16"), Storage("fp8"), Storage("int8", "int8", tower="int8")
INT6, INT5, INT4 = Storage("int6", "int8"), Storage("int5", "int8"), Storage("int4", "int8", tower="int8")
QWEN3_VL, MIXTURE = "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3.6-35B-A3B"
# Each has what the ones before it lack: kinds of layers, biases, widths of heads, windows.
NETWORKS: dict[str, tuple[str, Storage]] = {
    "Qwen3-VL-8B, bf16": (QWEN3_VL, BF16),
    "Qwen3-VL-8B, fp8": (QWEN3_VL, FP8),
    "Qwen3-VL-8B, int8": (QWEN3_VL, INT8),
    "Qwen3-VL-8B, int6": (QWEN3_VL, INT6),
    "Qwen3-VL-8B, int5": (QWEN3_VL, INT5),
    "Qwen3-VL-8B, int4": (QWEN3_VL, INT4),
    "Qwen3.6-35B-A3B, bf16": (MIXTURE, BF16),
    "Qwen3.6-35B-A3B, fp8": (MIXTURE, FP8),
    "Qwen3.6-35B-A3B, int8": (MIXTURE, INT8),
    "Qwen3.6-35B-A3B, int4": (MIXTURE, INT4),
    "Qwen3.6-35B-A3B, int4, experts in host memory": (MIXTURE, replace(INT4, expert_slots=64)),
    "Qwen2.5-VL-3B, int4": ("Qwen/Qwen2.5-VL-3B-Instruct", INT4),
    "Phi-3-mini, int6": ("microsoft/Phi-3-mini-4k-instruct", INT6),
    "Qwen2.5-0.5B, bf16": ("Qwen/Qwen2.5-0.5B-Instruct", BF16),
}
CACHED = ("Qwen3-VL-8B, fp8", "Qwen3.6-35B-A3B, fp8", "Phi-3-mini, int6", "Qwen2.5-0.5B, bf16")  # in FP8, too
GGUF = "GGUF of all types"
GGUFS = {f"Qwen3-VL-8B, {GGUF}": QWEN3_VL, f"Qwen3.6-35B-A3B, {GGUF}": MIXTURE}
ROUNDING = "rounding while loading"
WIDE = {"Qwen3-VL-8B, int4 in float32": QWEN3_VL, "Qwen3.6-35B-A3B, int4 in float32": MIXTURE}
STEPS = EngineConfig(num_blocks=1, max_num_seqs=32, max_batched_tokens=2048)
FEW_STEPS = EngineConfig(num_blocks=1, max_num_seqs=2, max_batched_tokens=128)  # there are many layers
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
STACK_USE = re.compile(r"\b(?:STL|LDL)\b")
STORED = ("bf16", "fp8", "int8", "int4")
GGML = {kind.value: name for name, kind in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a card by a variant. `error`: why it can't be compiled, or "".

    `spills`: instructions that write to the stack or read it.
    """

    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spills: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """A variant as a process can be told of it. `digest`: its name, the same for any Triton."""

    module: str
    kernel: str
    values: tuple[object, ...]
    constants: dict[str, object]
    digest: str
    form: str

    def launch(self) -> KernelLaunch:
        """The launch, in this process."""
        kernel = getattr(sys.modules.get(self.module) or __import__(self.module, fromlist=["_"]), self.kernel)
        return KernelLaunch(kernel, self.values, self.constants, self.digest)


def published(name: str) -> ModelConfig:
    """Configuration of a model of the catalogue, with as many layers as have one of each kind."""
    entry = next((entry for entry in entries() if entry.name == name), None)
    if entry is None:
        sys.exit(f"{name} is not in the catalogue: snugvl plan lists it")
    return parse_config(entry.config, entry.name)


def network_of(name: str, hardware: Hardware) -> LoadableNetwork:
    """One of the networks, without memory, in the type that the card computes in."""
    model, storage = NETWORKS.get(name, ((GGUFS | WIDE).get(name, ""), INT4))
    config = published(model)
    text = config.text
    count = len(LAYOUTS) if name in GGUFS else max(text.kinds.index(kind) for kind in text.kinds) + 1
    kinds = text.kinds[:count]
    if name in GGUFS:
        kinds = tuple("full" for _ in LAYOUTS)
    network = without_memory(replace(config, text=replace(text, num_layers=count, kinds=kinds)))
    dtype = torch.bfloat16 if hardware.capability >= TENSOR_CORES else torch.float16
    network.to(torch.float32 if name in WIDE else dtype)
    if name in GGUFS:
        for layer, kind in zip(network.decoder.layers, LAYOUTS, strict=True):
            for module in layer.modules():
                if isinstance(module, Linear) and module.quantises:
                    module.store_blocks([(kind, module.rows)])
        network.decoder.embed_tokens.store_blocks([("Q6_K", network.decoder.embed_tokens.rows)])
    choose_formats(network, storage, Fp8Blocks(128, 128) if storage.layers == "fp8" else None)
    join_projections(network.decoder.layers)
    return network_from(replace(outline_of(network, network.config), slots=storage.expert_slots))


def names_on(hardware: Hardware) -> Iterator[str]:
    """Networks that a card can run, with what rounds their weights."""
    yield ROUNDING
    for name, (_, storage) in NETWORKS.items():
        since = FORMATS[storage.layers].since if storage.layers in FORMATS else (0, 0)
        if since is not None and hardware.capability >= since:
            yield name
    yield from (*GGUFS, *WIDE)


def launched_by(name: str, hardware: Hardware) -> list[Work]:
    """All variants that one of the networks launches, or what rounds its weights."""
    with torch.inference_mode(), dry_run(hardware) as launches:
        if name == ROUNDING:
            for kind in FEW_BITS:
                for group in sorted({FORMATS[kind].group, 32}):
                    to_few_bits(torch.empty(64, 512, device="meta"), kind, group)
        else:
            network = network_of(name, hardware)
            rehearse(network, FEW_STEPS if name in (*GGUFS, *WIDE) else STEPS)
            if name in CACHED:
                rehearse(network, replace(FEW_STEPS, kv_cache="fp8"))
    return list(map(work_of, launches))


def work_of(launch: KernelLaunch) -> Work:
    """A launch as another process can be told of it."""
    values, constants = launch.values, launch.constants
    told = [
        (value.dtype, look is trait and value.data_ptr() % 16 == 0)
        if isinstance(value, TensorAddress)
        else look(value)
        for look, value in zip(launch.kernel._looks, values, strict=False)
    ]
    told += [(name, constants[name]) for name in sorted(constants) if name not in BY_TRITON]
    digest = sha256(f"{launch.name} {told}".encode()).hexdigest()[:16]
    return Work(launch.kernel.kernel.fn.__module__, launch.name, values, constants, digest, form_of(launch))


def form_of(launch: KernelLaunch) -> str:
    """Words for all that makes variants of a kernel different code, but for sizes."""
    given: dict[str, Any] = {name: getattr(value, "value", value) for name, value in launch.constants.items()}
    words: list[str] = []
    if "TYPE" in given:
        words.append(GGML[given["TYPE"]])
    elif "FORMAT" in given:
        words.append(STORED[given["FORMAT"]])
    elif "BITS" in given:
        words.append(f"int{given['BITS']}")
    words += [f"{given[name]} a head" for name in ("DIM",) if name in given]
    types = [value.dtype for value in launch.values if isinstance(value, TensorAddress)]
    words += ["FP8 cache"] * ("DIM" in given and torch.uint8 in types)
    words += ["float32"] * (types[0] == torch.float32)
    words += ["one token"] * (given.get("SINGLE") is True)
    return ", ".join(words)


def heaviest(works: Iterable[Work]) -> list[Work]:
    """Of each kernel and form the variant with the largest tiles."""
    found: dict[tuple[str, str], Work] = {}
    for work in works:
        best = found.get((work.kernel, work.form))
        if best is None or _size(work) > _size(best):
            found[work.kernel, work.form] = work
    return list(found.values())


def _size(work: Work) -> tuple[int, str]:
    given = work.constants | {"SWIGLU": 2 if work.constants.get("SWIGLU") else 1}  # two products at once
    sizes = (value for name, value in given.items() if name.isupper() and name != "GROUP")
    return prod(value for value in sizes if type(value) is int and value > 1), work.digest


def source_of(kernel: Any) -> str:
    """Digest of a kernel's code and of all that it calls and reads, without comments and docstrings."""
    digest, seen = sha256(), set[str]()

    def add(function: Any) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        if name in seen or not name.startswith("snugvl."):
            return
        seen.add(name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            del body[0]
        digest.update(f"{name}\n{ast.unparse(tree)}\n".encode())
        names = inspect.getclosurevars(function)
        for key, value in sorted({**names.globals, **names.nonlocals}.items()):
            read(key, value, function)

    def read(key: str, value: Any, function: Any) -> None:
        value = value.kernel if isinstance(value, LaunchedKernel) else value
        if isinstance(value, ModuleType):
            for inner in function.__code__.co_names:
                if hasattr(value, inner) and value.__name__.startswith("snugvl."):
                    read(inner, getattr(value, inner), function)
        elif callable(getattr(value, "fn", None)):
            add(value.fn)
        elif inspect.isfunction(value):
            add(value)
        elif isinstance(value := getattr(value, "value", value), int | float | str | bool):
            digest.update(f"{key} = {value!r}\n".encode())

    add(kernel.kernel.fn)
    return digest.hexdigest()[:16]


@cache
def source(module: str, kernel: str) -> str:
    """`source_of` a kernel by its name."""
    return source_of(getattr(__import__(module, fromlist=["_"]), kernel))


def taken(launch: KernelLaunch) -> Usage:
    """Usage of a kernel that has been compiled, by its binary."""
    binary = compiled(launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = USAGE.search(_dumped("-res-usage", file.name))
        assert usage is not None
        stack = int(usage[2])
        spills = len(STACK_USE.findall(_dumped("-sass", file.name))) if stack else 0
    return Usage(int(usage[1]), binary.metadata.shared, stack, spills)


def _dumped(option: str, file: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    ran = subprocess.run([tool, option, file], capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


def usage_of(work: Work, hardware: Hardware) -> Usage:
    """A variant compiled for a card; in a process for this card alone."""
    driver.set_active(_DescribedDriver(hardware))
    try:
        return taken(work.launch())
    except Exception as error:  # all others are wanted
        return Usage(error=f"{type(error).__name__}: {error}"[:400])


class Table:
    """Usage of each variant, by Triton's version, card and kernel: `results/other_cards.json`.

    {"3.9.0": {"RTX 5060": {"gemm": {"source": digest, "forms": ["bf16", …], "launched": 61,
                                     "variants": {digest: [form, registers, …]}}}}}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, version: str, card: str) -> dict[str, Any]:
        """Rows of a card by a Triton, by kernel."""
        made: dict[str, Any] = self.values.setdefault(version, {}).setdefault(card, {})
        return made

    def begin(self, version: str, card: str, works: list[Work], chosen: list[Work]) -> list[Work]:
        """Forget what other sources made; which of the chosen variants are to be compiled."""
        known, by_kernel = self.of(version, card), defaultdict[str, dict[str, Work]](dict)
        for work in works:
            by_kernel[work.kernel][work.digest] = work
        for kernel in known.keys() - by_kernel.keys():
            del known[kernel]
        for kernel, variants in by_kernel.items():
            row = known.get(kernel, {"source": "", "variants": {}})
            digest = source(next(iter(variants.values())).module, kernel)
            kept = row["variants"] if row["source"] == digest else {}
            kept = {name: values for name, values in kept.items() if name in variants}
            forms = sorted({work.form for work in variants.values()})
            launched = " ".join(sorted(name[:SHORT] for name in variants))
            known[kernel] = {"source": digest, "forms": forms, "launched": launched, "variants": kept}
        return [work for work in chosen if work.digest not in known[work.kernel]["variants"]]

    def put(self, version: str, card: str, work: Work, usage: Usage) -> None:
        """Keep one."""
        values = [work.form, usage.registers, usage.shared_bytes, usage.stack_bytes, usage.spills]
        self.of(version, card)[work.kernel]["variants"][work.digest] = values + [usage.error] * bool(
            usage.error
        )

    def save(self) -> None:
        """Write it, and the table for people beside it."""
        lines = json.dumps(self.values, indent=1, sort_keys=True, ensure_ascii=False)
        lines = re.sub(r"\[\s+([^\]]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", lines)
        self.path.write_text(lines + "\n", encoding="utf-8")
        self.path.with_suffix(".txt").write_text(told(json.loads(lines)), encoding="utf-8")


def rows_of(kernels: dict[str, Any]) -> dict[tuple[str, str], Usage]:
    """The most of each figure, by kernel and form."""
    found: dict[tuple[str, str], Usage] = {}
    for kernel, row in kernels.items():
        for form, *figures in row["variants"].values():
            best, this = found.get((kernel, form), Usage()), Usage(*figures)
            found[kernel, form] = Usage(
                *(max(getattr(best, name), getattr(this, name)) for name in Usage.__dataclass_fields__)
            )
    return found


def failures(values: dict[str, Any]) -> list[str]:
    """Kernels that can't be compiled, or that take more of a card than there is, or than a context has."""
    found = []
    for version, cards in values.items():
        for card, kernels in cards.items():
            limit = SHARED_BYTES[CARDS[card].capability]
            for (kernel, form), usage in rows_of(kernels).items():
                why = usage.error
                if usage.shared_bytes > limit:
                    why = f"{usage.shared_bytes:,} bytes of shared memory, of {limit:,}"
                elif usage.stack_bytes > STACK_BYTES:
                    why = f"a stack of {usage.stack_bytes:,} bytes: the plan has {STACK_BYTES:,} a thread"
                if why:
                    found.append(f"{card}, Triton {version}: {kernel} ({form}): {why}")
    return found


def told(values: dict[str, Any]) -> str:
    """The table for people."""
    lines = [
        "Our kernels, compiled for each generation of cards: python benchmarks/other_cards.py",
        "The worst of each card: registers of a thread, KiB of a program's shared memory and what there is,",
        "bytes of a thread's stack, and MiB of local memory: multiprocessors × threads × stack.",
        f"A context has {STACK_BYTES:,} bytes a thread. A form is what makes code different: format, type",
        "of a GGUF's blocks, width of a head, type of the cache. By kernel and form below.",
        "",
        f"{'card':<10}{'cc':>5}  {'Triton':<7}{'kernels':>8}{'forms':>10}{'variants':>10}{'failed':>8}"
        f"{'registers':>11}  {'shared KiB':<28}{'stack bytes':<34}{'local MiB':>9}",
    ]  # fmt: skip
    for card, hardware in CARDS.items():
        for version, cards in values.items():
            if card in cards:
                lines.append(_worst(card, hardware, version, cards[card]))
    for version, cards in values.items():
        lines += [
            "",
            f"Triton {version}: registers, KiB shared, bytes of stack (instructions that use it)",
            "",
        ]
        by_card = {card: rows_of(cards[card]) for card in CARDS if card in cards}
        names = sorted({name for rows in by_card.values() for name in rows})
        lines.append(f"{'':<58}" + "".join(f"{card:>20}" for card in by_card))
        for kernel, form in names:
            cells = (_cell(rows.get((kernel, form))) for rows in by_card.values())
            lines.append(f"{kernel:<18}{form:<40}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _worst(card: str, hardware: Hardware, version: str, kernels: dict[str, Any]) -> str:
    rows = rows_of(kernels)
    most = {
        by: max(rows.items(), key=lambda row, by=by: getattr(row[1], by), default=(("", ""), Usage()))  # type: ignore[misc]
        for by in ("shared_bytes", "stack_bytes", "registers")
    }
    (shared, room), (stack, kept), (_, wide) = most.values()
    limit = SHARED_BYTES[hardware.capability] // KIB
    local = local_memory_bytes(hardware.capability, hardware.units, kept.stack_bytes) / KIB**2
    forms = f"{len(rows)}/{sum(len(row['forms']) for row in kernels.values())}"
    compiled_ = [len(row["variants"]) for row in kernels.values()]
    variants = f"{sum(compiled_)}/{sum(len(row['launched'].split()) for row in kernels.values())}"
    done = f"{sum(map(bool, compiled_))}/{len(kernels)}"
    return (
        f"{card:<10}{hardware.capability[0]:>3}.{hardware.capability[1]}  {version:<7}{done:>8}{forms:>10}"
        f"{variants:>10}{sum(bool(usage.error) for usage in rows.values()):>8}{wide.registers:>11}  "
        f"{f'{room.shared_bytes / KIB:.0f} of {limit} ({shared[0]})':<28}"
        f"{f'{kept.stack_bytes} ({stack[0]}, {stack[1]})' if kept.stack_bytes else '0':<34}{local:>9.1f}"
    )


def _cell(usage: Usage | None) -> str:
    if usage is None:
        return "–"
    if usage.error:
        return "fails"
    stack = f" {usage.stack_bytes}({usage.spills})" if usage.stack_bytes else ""
    return f"{usage.registers} {usage.shared_bytes / KIB:.0f}{stack}"


def stale(values: dict[str, Any], pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Why the table isn't of these sources, a sentence each. `pairs`: card and network to be looked at."""
    for version, cards in values.items():
        for card, kernels in cards.items():
            for kernel, row in kernels.items():
                if kernel not in MODULES:
                    yield f"{kernel} is no kernel any more"
                elif row["source"] != source(MODULES[kernel], kernel):
                    yield f"{kernel} has changed since Triton {version} compiled it for {card}"
    for card, name in pairs:
        for work in launched_by(name, CARDS[card]):
            for version, cards in values.items():
                known = cards.get(card, {}).get(work.kernel, {"launched": ""})["launched"].split()
                if card in cards and work.digest[:SHORT] not in known:
                    yield f"{name} launches another {work.kernel} ({work.form}) on {card}, Triton {version}"


def entry_points() -> dict[str, str]:
    """Every kernel of the package that is launched, and its module."""
    found = {}
    for each in pkgutil.walk_packages(snugvl.layers.kernels.__path__, "snugvl.layers.kernels."):
        module = __import__(each.name, fromlist=["_"])
        for name, value in vars(module).items():
            if isinstance(value, LaunchedKernel) and value.kernel.fn.__module__ == each.name:
                found[name] = each.name
    return found


MODULES = entry_points()


def compile_card(card: str, table: Table, arguments: argparse.Namespace, ends: float) -> None:
    """Compile what the table lacks of a card, until a time."""
    hardware, version, began = CARDS[card], triton.__version__, time.perf_counter()
    names = arguments.networks or names_on(hardware)
    every = [work for name in names for work in launched_by(name, hardware)]
    works = list({(work.kernel, work.digest): work for work in every}.values())
    missing = table.begin(version, card, works, works if arguments.all else heaviest(works))
    missing = [work for work in missing if work.kernel in (arguments.only or [work.kernel])]
    print(
        f"{card}: {len(works)} variants, {len(missing)} to compile ({time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        running = {pool.submit(usage_of, work, hardware): work for work in missing}
        for count, done in enumerate(as_completed(running)):
            if not done.cancelled():
                table.put(version, card, running[done], done.result())
            if count % 20 == 19:
                table.save()
            if time.perf_counter() > ends:
                for each in running:
                    each.cancel()
    table.save()
    print(f"{card}: {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS), metavar="CARD")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=(), metavar="KERNEL")
    parser.add_argument("--networks", nargs="+", default=(), metavar="NAME", help="only what these launch")
    parser.add_argument("--all", action="store_true", help="every variant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="N", help="stop after so many")
    parser.add_argument(
        "--check", nargs="*", metavar="CARD:NETWORK", help="compile nothing: is it up to date?"
    )
    parser.add_argument("--print", action="store_true", help="compile nothing: write the table again")
    parser.set_defaults(out=machine.RESULTS / "other_cards.json")
    arguments = parser.parse_args()
    table, began = Table(arguments.out), time.perf_counter()
    if arguments.check is not None:
        pairs = [(pair.partition(":")[0], pair.partition(":")[2]) for pair in arguments.check]
        pairs = pairs or [(card, name) for card in arguments.cards for name in names_on(CARDS[card])]
        lacking = dict.fromkeys(stale(table.values, pairs))
        if told(table.values) != table.path.with_suffix(".txt").read_text(encoding="utf-8"):
            lacking["the table for people is not this one's: --print"] = None
        sys.exit("\n".join(lacking) or 0)
    if not arguments.print:
        for card in arguments.cards:
            compile_card(card, table, arguments, began + arguments.seconds)
    table.save()
    print(told(table.values).partition("\n\nTriton")[0])
    sys.exit("\n".join(failures(table.values)) or 0)


if __name__ == "__main__":
    main()
