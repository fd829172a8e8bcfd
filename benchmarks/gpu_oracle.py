"""Our engine against transformers on the exact architecture of a real checkpoint, on a GPU.

Preprocessing, logits and 64 greedy tokens, for prompts with 0, 1 and 3 images. In float32 both must agree;
in bfloat16 each is compared with the float32 logits of transformers, so that ours has the oracle's own
rounding as its yardstick.

    python benchmarks/gpu_oracle.py CHECKPOINT [--out FILE]
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

import machine
from snugvl.backends.protocol import user
from snugvl.checkpoint.configs import read_config
from snugvl.config import EngineConfig, KVFormat
from snugvl.engine.caches import allocate
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.attention import AttentionMetadata
from snugvl.models.batch import Batch
from snugvl.models.loader import load_model
from snugvl.models.mrope import mrope_positions
from snugvl.models.networks import LoadableNetwork
from snugvl.models.qwen3_vl import Qwen3VL
from snugvl.sampling import SamplingParams

NEW_TOKENS = 64
SIZES = {"no image": [], "one image": [(1024, 1024)], "three images": [(640, 480), (333, 777), (1000, 64)]}


@dataclass
class Case:
    """One prompt, as ours and as the oracle's processor prepared it."""

    name: str
    ours: PreparedPrompt
    theirs: dict[str, torch.Tensor]


def pictures(sizes: list[tuple[int, int]]) -> list[Image.Image]:
    """Smooth random pictures, the same every time."""
    generator, smooth = np.random.default_rng(0), Image.Resampling.BICUBIC
    return [
        Image.fromarray(generator.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize(size, smooth)
        for size in sizes
    ]


def prepare(folder: Path) -> list[Case]:
    """Every case through both processors. transformers' needs torchvision; without it ours feeds both."""
    config = read_config(folder)
    processor = Processor.from_folder(folder, config)
    oracle = None
    if config.vision is not None:
        try:
            oracle = AutoProcessor.from_pretrained(folder)
        except ImportError:
            print("no torchvision: transformers gets our inputs, so preprocessing is not compared")
    cases = []
    for name, sizes in SIZES.items():
        if sizes and config.vision is None:
            continue
        images, text = pictures(sizes), f"Describe what you see: {name}."
        ours = processor.prepare([user(*images, text)])
        theirs = as_tensors(ours, config.placeholders[:1])
        if oracle is not None:
            content = [{"type": "image", "image": image} for image in images] + [
                {"type": "text", "text": text}
            ]
            rendered = oracle.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            theirs = dict(oracle(text=[rendered], images=images or None, return_tensors="pt"))
        cases.append(Case(name, ours, theirs))
    return cases


def as_tensors(prompt: PreparedPrompt, image_tokens: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Our prompt in the form of transformers' processors."""
    ids = torch.tensor([prompt.prompt_ids])
    inputs = {"input_ids": ids}
    if image_tokens:
        inputs["mm_token_type_ids"] = (ids == image_tokens[0]).long()
    if prompt.vision:
        inputs["pixel_values"] = torch.cat([item.values() for item in prompt.vision])
        inputs["image_grid_thw"] = torch.tensor([item.grid_thw for item in prompt.vision])
    return inputs


def compare_inputs(cases: list[Case]) -> list[dict[str, Any]]:
    """Token ids and patches of both processors."""
    rows = []
    for case in cases:
        same = list(case.ours.prompt_ids) == case.theirs["input_ids"][0].tolist()
        worst = 0.0
        if case.ours.vision:
            ours = torch.cat([item.values() for item in case.ours.vision])
            worst = (ours - case.theirs["pixel_values"].float()).abs().max().item()
        tokens = len(case.ours.prompt_ids)
        rows.append({"case": case.name, "tokens": tokens, "same_ids": same, "worst_patch_value": worst})
        print(
            f"inputs   {case.name:<14}{tokens:>6} tokens   same ids: {same}   worst patch value: {worst:.4f}"
        )
    return rows


def our_logits(model: LoadableNetwork, prompt: PreparedPrompt, kv: KVFormat = "bf16") -> torch.Tensor:
    """Logits of every prompt position, `[tokens, vocab]`, in one prefill."""
    config, ids, device = model.config, list(prompt.prompt_ids), model.device
    total, pads = len(ids), config.placeholders
    grids = [item.grid_thw for item in prompt.vision]
    merge = 1 if config.vision is None else config.vision.spatial_merge_size
    positions, _ = mrope_positions(ids, grids, placeholders=pads, merge_size=merge)
    blocks = -(-total // 16)
    cache = allocate(model, EngineConfig(num_blocks=blocks, max_num_seqs=1, kv_cache=kv))
    everything = torch.arange(total, device=device)
    table = torch.arange(blocks, device=device)[None]
    rows = torch.tensor([i for i, token in enumerate(ids) if token in pads], device=device)
    embeds = None
    if grids:
        assert isinstance(model, Qwen3VL)
        embeds = model.encode_vision(torch.cat([item.values() for item in prompt.vision]), grids)
    batch = Batch(
        input_ids=torch.tensor(ids, device=device),
        positions=positions.to(device),
        attention=AttentionMetadata((total,), (total,), everything, table, 16, seats=everything[:1] * 0),
        logit_rows=everything,
        vision_rows=rows if grids else None,
        vision_embeds=embeds,
    )
    return model.forward(batch, cache)


def our_tokens(model: LoadableNetwork, prompt: PreparedPrompt) -> tuple[list[int], float]:
    """Greedy tokens through the whole engine, and the seconds of a decode step."""
    config = EngineConfig(num_blocks=512, max_model_len=8192, max_batched_tokens=512)
    engine = Engine(model, config)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    engine.add(EngineRequest("0", prompt.prompt_ids, sampling, prompt.vision))
    tokens: list[int] = []
    first = 0.0
    while engine.has_work:
        tokens += [output.token_id for output in engine.step() if output.token_id is not None]
        first = first or (time.perf_counter() if tokens else 0.0)
    engine.check_integrity()
    return tokens, (time.perf_counter() - first) / (NEW_TOKENS - 1)


def their_tokens(model: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    """Greedy tokens of transformers' generate()."""
    total = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, temperature=None,
        top_p=None, top_k=None,
    )  # fmt: skip
    result: list[int] = output[0, total:].tolist()
    return result


def measured(build: Callable[[], Any], what: str) -> tuple[Any, dict[str, float]]:
    """Load a model; seconds and GPU bytes that took (0 without a GPU)."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    model = build()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    row = {
        "load_s": time.perf_counter() - start,
        "weights_gib": (torch.cuda.memory_allocated() - before) / 2**30,
        "load_peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
    }
    print(
        f"load     {what:<22}{row['load_s']:6.1f} s{row['weights_gib']:8.3f} GiB, "
        f"peak {row['load_peak_gib']:.3f}"
    )
    return model, row


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens agree from the start."""
    pairs = zip(first, second, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(first))


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value - reference‖ / ‖reference‖."""
    return ((value - reference).norm() / reference.norm()).item()


@torch.inference_mode()
def compare(
    folder: Path,
    cases: list[Case],
    dtype: torch.dtype,
    device: torch.device,
    truth: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Both engines in one dtype; fills `truth` with the float32 oracle's logits."""
    name = str(dtype).removeprefix("torch.")
    kind = AutoModelForCausalLM if read_config(folder).vision is None else AutoModelForImageTextToText
    oracle, their_load = measured(
        lambda: kind.from_pretrained(folder, dtype=dtype, device_map=device),
        f"transformers {name}",
    )
    logits, tokens = {}, {}
    for case in cases:
        inputs = {key: value.to(device) for key, value in case.theirs.items()}
        logits[case.name] = oracle(**inputs).logits[0].float().cpu()
        tokens[case.name] = their_tokens(oracle, inputs)
    del oracle, inputs
    ours, our_load = measured(lambda: load_model(folder, dtype=dtype, device=device), f"snugvl {name}")
    rows = []
    for case in cases:
        mine = our_logits(ours, case.ours).cpu()
        reference = truth.setdefault(case.name, logits[case.name])
        our_ids, step_s = our_tokens(ours, case.ours)
        same = common_prefix(our_ids, tokens[case.name])
        row = {
            "case": case.name,
            "dtype": name,
            "max_abs_difference": (mine - logits[case.name]).abs().max().item(),
            "relative_difference": relative(mine, logits[case.name]),
            "our_error_to_fp32": relative(mine, reference),
            "their_error_to_fp32": relative(logits[case.name], reference),
            "top1_agreement": (mine.argmax(-1) == logits[case.name].argmax(-1)).float().mean().item(),
            "equal_greedy_tokens": same,
            "decode_step_ms": step_s * 1e3,
        }
        rows.append(row)
        print(
            f"{name:<9}{case.name:<14} max |Δ| {row['max_abs_difference']:.2e}"
            f"  rel {row['relative_difference']:.2e}"
            f"  to fp32: ours {row['our_error_to_fp32']:.2e}, theirs {row['their_error_to_fp32']:.2e}"
            f"  top-1 {row['top1_agreement']:.4f}  greedy {same}/{NEW_TOKENS}"
        )
    return {"transformers_load": their_load, "snugvl_load": our_load, "rows": rows}


def main() -> None:
    """Compare in float32, then in bfloat16."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(machine.describe())
    cases = prepare(arguments.checkpoint)
    results: dict[str, Any] = {"checkpoint": arguments.checkpoint.name, "inputs": compare_inputs(cases)}
    truth: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        results[str(dtype)] = compare(arguments.checkpoint, cases, dtype, arguments.device, truth)
    machine.save("gpu_oracle", results, arguments.out)


if __name__ == "__main__":
    main()
