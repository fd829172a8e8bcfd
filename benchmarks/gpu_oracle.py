"""Our engine against transformers on the exact architecture of a real checkpoint, on a GPU.

Preprocessing, logits and up to 64 greedy tokens, for prompts with 0, 1 and 3 images and a video. In float32
both must agree; in bfloat16 each is compared with the float32 logits of transformers, so that ours has the
oracle's own rounding as its yardstick. Where tokens differ, the oracle's own logits of that step say how
clearly it chose: the difference between its token and ours (`margin`), beside the error of its bfloat16
logits at the prompt's tokens (`noise`, root of the mean square). Random weights leave many such ties; a
trained model few.

Then the same tokens once more by recordings, and with guesses of which most are right (`--speculation`).

    python benchmarks/gpu_oracle.py CHECKPOINT [--out FILE]
    python benchmarks/gpu_oracle.py src/snugvl/pocket --drawn 64             # answers of a trained model
"""

import gc
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

import machine
from snugvl.checkpoint.families import read_config
from snugvl.core.config import EngineConfig, KVFormat
from snugvl.core.messages import Video, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine import speculation
from snugvl.engine.drafts import NgramIndex
from snugvl.engine.engine import Engine
from snugvl.engine.memory import allocate
from snugvl.engine.request import EngineRequest
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.attention import AttentionMetadata
from snugvl.models.batch import ForwardBatch, encoded
from snugvl.models.loader import load_model
from snugvl.models.networks import LoadableNetwork
from snugvl.models.rope import mrope_positions

NEW_TOKENS = 64
RECORDINGS_BYTES = 2 << 30  # more than any of these prompts needs
SHAPES = ("rectangle", "ellipse", "rounded_rectangle")
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple")
QUESTIONS = ("Describe this picture.", "How many shapes are there?", "What colour is the largest shape?")
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


def drawn(index: int) -> Image.Image:
    """Some shapes on a plain ground, another picture for each index."""
    generator = np.random.default_rng(index)
    image = Image.new("RGB", (256, 256), str(generator.choice(COLOURS)))
    pen = ImageDraw.Draw(image)
    for _ in range(int(generator.integers(1, 5))):
        x, y, width, height = generator.integers([0, 0, 24, 24], [180, 180, 76, 76]).tolist()
        draw = getattr(pen, str(generator.choice(SHAPES)))
        draw((x, y, x + width, y + height), fill=str(generator.choice(COLOURS)))
    return image


def questions(folder: Path, count: int) -> list[Case]:
    """About drawn pictures; both get our inputs."""
    config = read_config(folder)
    processor = Processor.from_folder(folder, config)
    cases = []
    for index in range(count):
        question = QUESTIONS[index % len(QUESTIONS)]
        ours = processor.prepare([user(drawn(index), question)])
        cases.append(Case(f"{index}: {question}", ours, as_tensors(ours, config.placeholders)))
    return cases


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
        theirs = as_tensors(ours, config.placeholders)
        if oracle is not None:
            content = [{"type": "image", "image": image} for image in images] + [
                {"type": "text", "text": text}
            ]
            rendered = oracle.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            theirs = dict(oracle(text=[rendered], images=images or None, return_tensors="pt"))
        cases.append(Case(name, ours, theirs))
    if config.vision is not None:
        video = Video(tuple(pictures([(192, 128)] * 8)), tuple(index / 2 for index in range(8)))
        ours = processor.prepare([user(video, "Describe what happens: a video.")])
        if ours.vision[0].time_step is None:  # else transformers wants seconds, too
            cases.append(Case("a video", ours, as_tensors(ours, config.placeholders)))
    return cases


def as_tensors(prompt: PreparedPrompt, placeholders: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Our prompt in the form of transformers' processors. `placeholders`: of images, and of videos."""
    ids = torch.tensor([prompt.prompt_ids])
    inputs = {"input_ids": ids}
    if placeholders:
        kinds = torch.zeros_like(ids)
        for kind, token in enumerate(placeholders, 1):
            kinds[ids == token] = kind
        inputs["mm_token_type_ids"] = kinds
    if prompt.vision:
        video = inputs["mm_token_type_ids"].max() > 1
        values = torch.cat([item.values() for item in prompt.vision])
        inputs["pixel_values_videos" if video else "pixel_values"] = values
        grids = torch.tensor([item.grid_thw for item in prompt.vision])
        inputs["video_grid_thw" if video else "image_grid_thw"] = grids
    return inputs


def compare_inputs(cases: list[Case]) -> list[dict[str, Any]]:
    """Token ids and patches of both processors."""
    rows = []
    for case in cases:
        same = list(case.ours.prompt_ids) == case.theirs["input_ids"][0].tolist()
        worst = 0.0
        if case.ours.vision and "pixel_values" in case.theirs:
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
        pictures = (
            model.encode_in_steps(item.reader(device, model.dtype), item.grid_thw) for item in prompt.vision
        )
        embeds = torch.cat([encoded(steps) for steps in pictures])
    batch = ForwardBatch(
        input_ids=torch.tensor(ids, device=device),
        positions=positions.to(device),
        attention=AttentionMetadata(
            (total,), (total,), everything, table, 16, state_slots=everything[:1] * 0
        ),
        logit_rows=everything,
        vision_rows=rows if grids else None,
        vision_embeds=embeds,
    )
    return model.forward(batch, cache)


def our_tokens(model: LoadableNetwork, prompt: PreparedPrompt) -> tuple[list[int], float]:
    """Greedy tokens through the whole engine, and the seconds of a decode step."""
    config = EngineConfig(num_blocks=512, max_model_len=8192, max_batched_tokens=512)
    with closing(Engine(model, config)) as engine:
        return answered(engine, prompt)


def recorded_tokens(model: LoadableNetwork, prompt: PreparedPrompt) -> list[int] | None:
    """The same once more, by recordings: of the third time, since those are made of what comes again.

    None where nothing is recorded.
    """
    config = EngineConfig(num_blocks=512, max_model_len=8192, max_batched_tokens=512, prefix_cache=False)
    with closing(Engine(model, replace(config, step_graph_bytes=RECORDINGS_BYTES))) as engine:
        tokens = [answered(engine, prompt)[0] for _ in range(3)][-1]
        recorded = engine.stats.recorded
    if recorded:
        return tokens
    assert model.config.text.linear is not None, "nothing was recorded"
    return None


def guessed_tokens(
    model: LoadableNetwork, prompt: PreparedPrompt, said: list[int]
) -> tuple[list[int], float]:
    """The same once more, of which each but every fifth token is guessed; and how many tokens a step brought.

    By recordings where there are any, of the third time.
    """

    class Told:
        def __init__(self, _: NgramIndex, generated: list[int]) -> None:
            self.generated = generated

        def propose(self, most: int) -> list[int]:
            start = len(self.generated)
            return [token if place % 5 else 5 for place, token in enumerate(said)][start : start + most]

    config = EngineConfig(num_blocks=512, max_model_len=8192, max_batched_tokens=512, speculation="ngram")
    config = replace(config, prefix_cache=False, step_graph_bytes=RECORDINGS_BYTES)
    with closing(Engine(model, config)) as engine, patch.object(speculation, "NgramProposer", Told):
        for _ in range(2):
            answered(engine, prompt)
        before = engine.stats.accepted_tokens
        tokens = answered(engine, prompt)[0]
        right = engine.stats.accepted_tokens - before
    return tokens, len(tokens) / max(len(tokens) - right, 1)


def answered(engine: Engine, prompt: PreparedPrompt) -> tuple[list[int], float]:
    """Greedy tokens, and the seconds of a decode step."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    engine.add(EngineRequest("0", prompt.prompt_ids, sampling, prompt.vision))
    tokens: list[int] = []
    first = 0.0
    while engine.has_work:
        tokens += [output.token_id for output in engine.step() if output.token_id is not None]
        first = first or (time.perf_counter() if tokens else 0.0)
    engine.check_integrity()
    return tokens, (time.perf_counter() - first) / max(len(tokens) - 1, 1)


@dataclass
class Answer:
    """Greedy tokens, and the logits that each was taken from, `[tokens, vocab]` float32."""

    tokens: list[int]
    logits: torch.Tensor


def their_answer(model: Any, inputs: dict[str, torch.Tensor]) -> Answer:
    """Of transformers' generate()."""
    total = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, temperature=None, top_p=None, top_k=None,
        repetition_penalty=1.0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return Answer(output.sequences[0, total:].tolist(), torch.cat(output.logits).float().cpu())


@dataclass
class Agreement:
    """How far two greedy answers agree; `margin`: how clearly the oracle took the token that we didn't."""

    equal: int
    of: int
    margin: float | None


def agreement(ours: list[int], theirs: Answer) -> Agreement:
    """From the first token on."""
    same = common_prefix(ours, theirs.tokens)
    if same == max(len(ours), len(theirs.tokens)):
        return Agreement(same, same, None)
    margin = None
    if same < min(len(ours), len(theirs.tokens)):
        at = theirs.logits[same]
        margin = float(at[theirs.tokens[same]] - at[ours[same]])
    return Agreement(same, len(theirs.tokens), margin)


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
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value - reference‖ / ‖reference‖."""
    return ((value - reference).norm() / reference.norm()).item()


@torch.inference_mode()
def compare(
    folder: Path, cases: list[Case], dtype: torch.dtype, device: torch.device, truth: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Both engines in one dtype; fills `truth` with the float32 oracle's logits."""
    name = str(dtype).removeprefix("torch.")
    kind = AutoModelForCausalLM if read_config(folder).vision is None else AutoModelForImageTextToText
    oracle, their_load = measured(
        lambda: kind.from_pretrained(folder, dtype=dtype, device_map=device), f"transformers {name}"
    )
    logits, answers = {}, {}
    for case in cases:
        inputs = {key: value.to(device) for key, value in case.theirs.items()}
        logits[case.name] = oracle(**inputs).logits[0].float().cpu()
        answers[case.name] = their_answer(oracle, inputs)
    del oracle, inputs
    ours, our_load = measured(lambda: load_model(folder, dtype=dtype, device=device), f"snugvl {name}")
    rows = []
    for case in cases:
        mine = our_logits(ours, case.ours).cpu()
        reference = truth.setdefault(case.name, logits[case.name])
        our_ids, step_s = our_tokens(ours, case.ours)
        again = recorded_tokens(ours, case.ours) if device.type == "cuda" else our_ids
        guessed, tokens_a_step = guessed_tokens(ours, case.ours, our_ids)
        same = agreement(our_ids, answers[case.name])
        noise = float((logits[case.name] - reference).square().mean().sqrt())
        row = {
            "case": case.name,
            "dtype": name,
            "max_abs_difference": (mine - logits[case.name]).abs().max().item(),
            "relative_difference": relative(mine, logits[case.name]),
            "our_error_to_fp32": relative(mine, reference),
            "their_error_to_fp32": relative(logits[case.name], reference),
            "top1_agreement": (mine.argmax(-1) == logits[case.name].argmax(-1)).float().mean().item(),
            "equal_greedy_tokens": same.equal,
            "greedy_tokens": same.of,
            "recorded_equal": None if again is None else again == our_ids,
            "guessed_equal": guessed == our_ids,
            "guessed_tokens_a_step": tokens_a_step,
            "margin": same.margin,
            "noise": noise,
            "decode_step_ms": step_s * 1e3,
        }
        rows.append(row)
        print(
            f"{name:<9}{case.name:<14} max |Δ| {row['max_abs_difference']:.2e}"
            f"  rel {row['relative_difference']:.2e}"
            f"  to fp32: ours {row['our_error_to_fp32']:.2e}, theirs {row['their_error_to_fp32']:.2e}"
            f"  top-1 {row['top1_agreement']:.4f}  greedy {same.equal}/{same.of}{_tie(same, noise)}"
            f"{recordings_said(our_ids, again)}"
            f"{'' if guessed == our_ids else '  with guesses OTHERS'} ({tokens_a_step:.1f} tokens a step)"
        )
    return {"transformers_load": their_load, "snugvl_load": our_load, "rows": rows}


def recordings_said(tokens: list[int], again: list[int] | None) -> str:
    """What to print of the answer by recordings."""
    if again is None:
        return "  recordings: none"
    return "" if again == tokens else "  by recordings OTHERS"


def _tie(same: Agreement, noise: float) -> str:
    return "" if same.margin is None else f" (margin {same.margin:.3f}, noise {noise:.3f})"


def count(rows: list[dict[str, Any]]) -> str:
    """How many answers are equal, and by how little the others were missed."""
    equal = sum(row["equal_greedy_tokens"] == row["greedy_tokens"] for row in rows)
    margins = [row["margin"] for row in rows if row["margin"] is not None]
    more = f"; largest margin where they differ {max(margins):.3f}" if margins else ""
    return f"{rows[0]['dtype']}: {equal} of {len(rows)} answers equal, token by token{more}"


def main() -> None:
    """Compare in float32, then in bfloat16."""
    parser = machine.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument(
        "--drawn", type=int, default=0, help="pictures to ask about, instead of the three cases"
    )
    arguments = parser.parse_args()
    print(machine.describe())
    folder, pictured = arguments.checkpoint, arguments.drawn
    cases = questions(folder, pictured) if pictured else prepare(folder)
    results: dict[str, Any] = {"checkpoint": arguments.checkpoint.name, "inputs": compare_inputs(cases)}
    truth: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        results[str(dtype)] = compare(folder, cases, dtype, arguments.device, truth)
        print(count(results[str(dtype)]["rows"]))
    machine.save("gpu_oracle", results, arguments.out)


if __name__ == "__main__":
    main()
