"""How far each format of weights and of the KV cache moves the logits of a trained model: pocket's.

    PYTHONPATH=benchmarks python -m training.pocket.format_error [--scenes 100] [--json FILE]

The model in float32 describes scenes that it never trained on, and answers a question about each. Every
format is given the same pictures, questions and answers, in one prefill, and its logits at the answers'
tokens are compared with float32's:

    error    ‖logits − those of float32‖ / ‖those of float32‖, of all tokens together
    KL       nats a token, from float32's distribution to this one
    top-1    tokens whose most likely successor stays the same

Exits with 1 if a format costs more than one that is offered by default may. bf16 is the yardstick: what the
official checkpoints are published and computed in. W8A8 is not offered: what its inputs in FP8 would cost.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from training.pocket.evaluate import make, stage

import machine
import snugvl
from gpu_oracle import our_logits
from snugvl.checkpoint.families import read_config
from snugvl.core.config import EngineConfig, KVFormat
from snugvl.core.messages import user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.linear import Linear
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork

POCKET = Path(snugvl.__file__).parent / "pocket"
BLOCK, E4M3_MOST = 128, 448.0
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOST_TOKENS = 96
# What a format may cost that is offered by default (docs/plan.md).
MOST_KL, LEAST_TOP1 = 0.01, 0.99


Inputs = Literal["fp8", "15 bits", "8 bits"]


@dataclass(frozen=True, slots=True)
class Way:
    """How weights, keys and values are stored, and what it is computed in. `inputs`: what those of products
    with stored weights are rounded to, if not to that."""

    name: str
    storage: Storage = field(default_factory=Storage)
    kv: KVFormat = "bf16"
    dtype: torch.dtype = torch.bfloat16
    inputs: Inputs | None = None


WAYS = (
    Way("bf16"),
    Way("fp8", Storage("fp8")),
    Way("fp8 by fp8 (W8A8)", Storage("fp8"), inputs="fp8"),
    Way("int8", Storage("int8")),
    Way("int6", Storage("int6")),
    Way("int5", Storage("int5")),
    Way("int4, groups of 64", Storage("int4", group=64)),
    Way("int4, groups of 128", Storage("int4", group=128)),
    Way("bf16, int8 head", Storage(head="int8")),
    Way("bf16, int8 tower", Storage(tower="int8")),
    Way("bf16, FP8 KV cache", kv="fp8"),
    Way("int4, int8 head and tower, FP8 KV cache", Storage("int4", head="int8", tower="int8"), "fp8"),
)


def fp8_copy(folder: Path, original: Path = POCKET) -> Path:
    """A model with the decoder's matrices in FP8, in the layout of the official FP8 checkpoints."""
    shutil.copytree(original, folder, dirs_exist_ok=True)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    values["quantization_config"] |= {"fmt": "e4m3", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(values))
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.removesuffix(".weight").rpartition(".")[2] in LINEARS]:
        rows, columns = state[name].shape
        blocks = state[name].float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / E4M3_MOST
        stored = (blocks / scale[:, None, :, None]).view(rows, columns)
        state[name], state[f"{name}_scale_inv"] = stored.to(torch.float8_e4m3fn), scale
    save_file(state, folder / "model.safetensors")
    return folder


def scenes(count: int, processor: Processor) -> Iterable[PreparedPrompt]:
    """Prompts about scenes of the test split: a caption of each, and a question."""
    on = stage("noto")
    chosen = random.Random(0)
    for index in range(count):
        _, image, asked = make("test", index, on)
        for text in ("Describe this picture in detail.", chosen.choice(asked).question):
            yield processor.prepare([user(image, text)])


def answered(
    model: LoadableNetwork, prompts: list[PreparedPrompt], ends: frozenset[int], kv: KVFormat = "bf16"
) -> list[tuple[int, ...]]:
    """The greedy answer to each."""
    engine = Engine(model, EngineConfig(num_blocks=2048, max_model_len=4096, kv_cache=kv))
    sampling = SamplingParams(max_tokens=MOST_TOKENS)
    for name, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(name), prompt.prompt_ids, sampling, prompt.vision, stop_ids=ends))
    answers: dict[str, list[int]] = {str(name): [] for name in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                answers[output.request_id].append(output.token_id)
    engine.close()
    return [tuple(answers[str(name)]) for name in range(len(prompts))]


def at_answers(
    model: LoadableNetwork, prompts: list[PreparedPrompt], answers: list[tuple[int, ...]], kv: KVFormat
) -> torch.Tensor:
    """Logits where each token of the answers is chosen, `[tokens, vocab]`."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = replace(prompt, prompt_ids=(*prompt.prompt_ids, *answer))
        logits = our_logits(model, whole, kv)
        rows.append(logits[len(prompt.prompt_ids) - 1 : -1].float())
    return torch.cat(rows)


@contextmanager
def rounded_inputs(inputs: Inputs) -> Iterator[None]:
    """Matrices of few bits and in FP8 blocks get rounded inputs, with a scale for 128 columns.

    Args:
        inputs: "fp8": e4m3, what FP8 by FP8 would compute; "15 bits": integers times a power of two, as
            the kernel for one row of int4 has them (`lone_codes.py`); "8 bits": integers times any scale.
    """
    plain = Linear._plain

    def rounded(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        if linear.format != "bf16":
            groups = x.float().view(*x.shape[:-1], -1, BLOCK)
            most = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12)
            if inputs == "fp8":
                scale = most / E4M3_MOST
                found = (groups / scale).to(torch.float8_e4m3fn).float() * scale
            else:
                scale = (most.log2().floor() - 13).exp2() if inputs == "15 bits" else most / 127
                found = (groups / scale).round() * scale
            x = found.view(x.shape).to(x.dtype)
        return plain(linear, x)

    with mock.patch.object(Linear, "_plain", rounded):
        yield


def compared(logits: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """The three figures of one format."""
    divergence = 0.0
    for few, exactly in zip(logits.split(1024), exact.split(1024), strict=True):  # a vocabulary is wide
        ours, right = few.log_softmax(-1), exactly.log_softmax(-1)
        divergence += (right.exp() * (right - ours)).sum().item()
    return {
        "relative_error": ((logits - exact).norm() / exact.norm()).item(),
        "kl_nats": divergence / len(exact),
        "top1_agreement": (logits.argmax(-1) == exact.argmax(-1)).float().mean().item(),
    }


@torch.inference_mode()
def main() -> None:
    """Every format, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=int, default=100)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(machine.describe())
    config = read_config(POCKET)
    processor = Processor.from_folder(POCKET, config)
    prompts = list(scenes(given.scenes, processor))
    exact_model = load_model(POCKET, dtype=torch.float32, device=given.device)
    answers = answered(exact_model, prompts, processor.tokenizer.eos_ids)
    exact = at_answers(exact_model, prompts, answers, "bf16")
    print(f"{len(prompts)} answers, {len(exact):,} tokens\n{'':<42}{'error':>9}{'KL':>10}{'top-1':>9}")
    results: dict[str, Any] = {"scenes": given.scenes, "tokens": len(exact), "formats": {}}
    with tempfile.TemporaryDirectory() as folder:
        fp8 = fp8_copy(Path(folder) / "pocket-fp8")
        for way in WAYS:
            source = fp8 if way.storage.layers == "fp8" else POCKET
            model = load_model(source, dtype=way.dtype, device=given.device, storage=way.storage)
            with rounded_inputs(way.inputs) if way.inputs else nullcontext():
                row = compared(at_answers(model, prompts, answers, way.kv), exact)
            results["formats"][way.name] = row
            print(f"{way.name:<42}{row['relative_error']:>9.2%}{row['kl_nats']:>10.5f}", end="")
            print(f"{row['top1_agreement']:>9.2%}", flush=True)
    machine.save("pocket/format_error", results, given.json)
    beyond = [
        name
        for name, row in results["formats"].items()
        if row["kl_nats"] > MOST_KL or row["top1_agreement"] < LEAST_TOP1
    ]
    if beyond:
        sys.exit(f"beyond {MOST_KL} nats a token or below {LEAST_TOP1:.0%}: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
