"""The plan's footprint of transformers against what it really takes, per component, on a GPU.

    python benchmarks/plan_vs_transformers.py CHECKPOINT_DIR... [--out FILE] [--device cpu]

Each checkpoint is loaded in a process of its own, in bf16 with SDPA attention. For every image size and
context (the prompt is padded with text up to it) one `generate` runs; hooks at the decoder's entry split
the allocator's peak into that of the vision tower, of prefill and of decoding. Memory of the whole card is
read through NVML (or `mem_get_info`). Results are written after every cell, so that a run that is cut short
keeps what it had. On a CPU it runs through without figures: a dry run.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import machine
from snugvl.checkpoint.read import facts_of
from snugvl.planner.footprint.total import Device, Footprint, footprint
from snugvl.planner.footprint.weights import weight_bytes
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.settings import Settings

SIDES = (448, 1024, 2048)  # pixels of a square image: 196, 1,024 and 4,096 tokens of Qwen3-VL
CONTEXTS = (4608, 8192, 16384)
NEW_TOKENS = 16
TEXT_TOKEN = 100
MIB = 1 << 20


class Card:
    """The GPU's memory as the driver tells it and as torch's allocator does; zeros on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._handle = _nvml_handle() if self.cuda else None
        self.base = self.used(early=True)

    def used(self, *, early: bool = False) -> int:
        """Bytes used on the whole card. `early`: before this process may have a CUDA context."""
        if not self.cuda:
            return 0
        if self._handle is not None:
            import pynvml  # type: ignore[import-untyped,unused-ignore]

            return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)
        if early:
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
            text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            return int(text.splitlines()[0]) * MIB
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def allocated(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def peak(self) -> int:
        """Most bytes of live tensors since `fresh`."""
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else 0

    def reserved_peak(self) -> int:
        """Most bytes of the allocator's segments since `fresh`."""
        return torch.cuda.max_memory_reserved(self.device) if self.cuda else 0

    def mark(self) -> None:
        """Start a new peak."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def fresh(self) -> None:
        """Give cached segments back and start a new peak."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self.mark()


def _nvml_handle() -> Any:
    try:
        import pynvml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return None
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


class Phases:
    """Splits one `generate` at the decoder's entries: vision, then prefill, then decoding."""

    def __init__(self, card: Card, decoder: torch.nn.Module) -> None:
        self.card = card
        self.peaks: dict[str, int] = {}
        self._calls = 0
        self._hooks = [
            decoder.register_forward_pre_hook(self._enter),
            decoder.register_forward_hook(self._leave),
        ]

    def run(self, call: Callable[[], Any]) -> dict[str, int]:
        """Peaks of live tensors in bytes: vision, prefill, decode."""
        self.peaks, self._calls = {}, 0
        self.card.mark()
        call()
        self._keep("decode")
        return self.peaks

    def _enter(self, *_: Any) -> None:
        self._keep("vision" if self._calls == 0 else "decode")
        self.card.mark()
        self._calls += 1

    def _leave(self, *_: Any) -> None:
        self._keep("prefill" if self._calls == 1 else "decode")
        self.card.mark()

    def _keep(self, phase: str) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.card.peak())

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def inputs_of(config: Any, side: int, prompt_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A prompt of one square image and text, as transformers' processor hands it over (float32 pixels)."""
    vision = config.vision_config
    grid = side // vision.patch_size
    tokens = grid * grid // vision.spatial_merge_size**2
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids = [config.vision_start_token_id, *[config.image_token_id] * tokens, config.vision_end_token_id]
    ids += [TEXT_TOKEN] * (prompt_tokens - len(ids))
    input_ids = torch.tensor([ids], device=device)
    generator = torch.Generator().manual_seed(side)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == config.image_token_id).long(),
        "pixel_values": torch.randn(grid * grid, patch_dim, generator=generator).to(device),
        "image_grid_thw": torch.tensor([[1, grid, grid]], device=device),
    }


def measure_context(card: Card) -> dict[str, int]:
    """The card after the context and after one matrix product, and cuBLAS' workspace in the allocator."""
    square = torch.ones(256, 256, dtype=torch.bfloat16, device=card.device)
    torch_bytes = card.used() - card.base
    product = square @ square
    del square, product
    card.fresh()
    return {
        "context_torch_bytes": torch_bytes,
        "context_bytes": card.used() - card.base,
        "cublas_workspace_bytes": card.allocated(),
    }


def load(folder: Path, card: Card) -> tuple[Any, dict[str, Any]]:
    """The model, and what loading took."""
    from transformers import AutoModelForImageTextToText

    before, used, start = card.allocated(), card.used(), time.perf_counter()
    card.fresh()
    model: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": str(card.device)}, attn_implementation="sdpa"
    )
    model.eval()
    load_peak = card.peak() - before
    seconds = time.perf_counter() - start
    card.fresh()
    row = {
        "seconds": seconds,
        "weights_bytes": card.allocated() - before,
        "weights_used_bytes": card.used() - used,
        "load_peak_bytes": load_peak,
    }
    return model, row


@torch.inference_mode()
def measure_cell(model: Any, card: Card, side: int, context: int) -> dict[str, Any]:
    """Peaks of one image and context above weights and inputs, and the card's reading after it."""
    card.fresh()
    base = card.allocated()
    inputs = inputs_of(model.config, side, context - NEW_TOKENS, card.device)
    phases = Phases(card, model.model.language_model)
    start = time.perf_counter()
    try:
        peaks = phases.run(
            lambda: model.generate(
                **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=0, temperature=None, top_p=None, top_k=None,
            )
        )  # fmt: skip
    finally:
        phases.close()
    seconds = time.perf_counter() - start
    row: dict[str, Any] = {"side": side, "context": context, "seconds": seconds}
    row |= {f"{phase}_bytes": max(0, peak - base) for phase, peak in peaks.items()}
    row["used_bytes"] = card.used() - card.base
    row["reserved_bytes"] = card.reserved_peak()
    return row


def predict(
    model: Inventory, side: int, context: int, context_bytes: int
) -> tuple[Footprint, dict[str, int]]:
    """The plan's figures for the same cell: the footprint, and the phases' peaks above weights."""
    settings = Settings("transformers", context=context, max_pixels=side * side)
    plan = footprint(model, settings, Device(context_bytes, context_measured=True))
    kv, pixels = plan.named("KV cache"), plan.named("pixel values")
    live = plan.phase_bytes("prefill") - plan.named("fragmentation")  # holes hold no tensors
    return plan, {
        "vision_bytes": plan.phase_bytes("vision") + pixels,
        "prefill_bytes": live + kv + pixels,
        "decode_bytes": plan.phase_bytes("decode") + kv + pixels,
    }


def measure(folder: Path, device: torch.device, keep: Callable[[dict[str, Any]], None]) -> None:
    """All cells of one checkpoint; `keep` gets the results so far after each."""
    inventoried = inventory(facts_of(str(folder), offline=True))
    card = Card(device)
    torch.zeros(1, device=device)
    result: dict[str, Any] = {"checkpoint": folder.name, **measure_context(card), "cells": []}
    keep(result)
    model, result["load"] = load(folder, card)
    result["load"]["predicted_weights_bytes"] = weight_bytes(inventoried, Settings("transformers"))
    keep(result)
    for side in SIDES:
        for context in CONTEXTS:
            cell: dict[str, Any] = {"side": side, "context": context}
            result["cells"].append(cell)
            try:
                cell["measured"] = measure_cell(model, card, side, context)
            except torch.OutOfMemoryError as error:
                cell["failed"] = str(error).splitlines()[0]
                keep(result)
                continue
            plan, peaks = predict(inventoried, side, context, result["context_bytes"])
            cell["predicted"] = {**peaks, "used_bytes": plan.total_bytes}
            cell["components"] = {f"{part.name} ({part.phase})": part.nbytes for part in plan.components}
            keep(result)
            show_cell(cell)


def show_cell(cell: dict[str, Any]) -> None:
    """One line a figure: predicted | measured | error."""
    for name, planned in cell["predicted"].items():
        found = cell["measured"].get(name, 0)
        label = f"{cell['side']:>5}² {cell['context']:>6,} {name.removesuffix('_bytes'):<8}"
        print(f"{label}{_columns(planned, found)}", flush=True)


def _columns(planned: int, found: int) -> str:
    error = f"{(planned - found) / found:+8.1%}" if found else f"{'':>8}"
    return f"{planned / MIB:>12,.1f}{found / MIB:>12,.1f}{(planned - found) / MIB:>+11,.1f}{error}"


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst relative error of each figure over all cells."""
    errors: dict[str, list[float]] = {}
    for result in results:
        load_row = result.get("load", {})
        if load_row.get("weights_bytes"):
            planned = load_row["predicted_weights_bytes"]
            errors.setdefault("weights", []).append(planned / load_row["weights_bytes"] - 1)
        for cell in result["cells"]:
            for name, planned in cell.get("predicted", {}).items():
                found = cell["measured"].get(name)
                if found:
                    errors.setdefault(name.removesuffix("_bytes"), []).append(planned / found - 1)
    return {
        name: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
        for name, values in errors.items()
    }


def main() -> None:
    """Measure each checkpoint in a child process and gather the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "plan_vs_transformers.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(arguments.checkpoints[0], arguments.device, lambda row: _write(arguments.child, row))
        return
    print(machine.describe())
    print(f"{'MiB':<22}{'predicted':>12}{'measured':>12}{'difference':>11}{'error':>8}")
    results: list[dict[str, Any]] = []
    for number, folder in enumerate(arguments.checkpoints):
        part = arguments.out.with_suffix(f".{number}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        print(folder, flush=True)
        child = [sys.executable, __file__, str(folder), "--device", str(arguments.device)]
        code = subprocess.run([*child, "--child", str(part)], check=False).returncode
        if part.is_file():
            results.append(json.loads(part.read_text()) | {"exit_code": code})
            part.unlink()
            show_load(results[-1])
        machine.save("plan_vs_transformers", {"results": results, "errors": summary(results)}, arguments.out)
    for name, error in summary(results).items():
        print(
            f"{name:<10} error: median {error['median']:+.1%}, "
            f"{error['lowest']:+.1%} … {error['highest']:+.1%}"
        )


def show_load(result: dict[str, Any]) -> None:
    """Context and weights."""
    print(
        f"context {result['context_bytes'] / MIB:,.1f} MiB with torch, one product and cuBLAS' workspace of "
        f"{result['cublas_workspace_bytes'] / MIB:,.1f}"
    )
    row = result.get("load", {})
    if row:
        print(f"{'weights':<22}{_columns(row['predicted_weights_bytes'], row['weights_bytes'])}")
        print(f"{'peak while loading':<22}{_columns(row['predicted_weights_bytes'], row['load_peak_bytes'])}")


def _write(path: Path, row: dict[str, Any]) -> None:
    path.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
