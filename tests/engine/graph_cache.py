"""Graphs of decodes, prompts, pictures and masks on a real GPU: memory to the byte, tokens, host time a step.

PYTHONPATH=src python tests/engine/graph_cache.py [cuda|cpu]     prints JSON; src may be another revision's
"""

import hashlib
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image, ImageDraw

import snugvl
from snugvl.checkpoint.families import read_config
from snugvl.core.config import EngineConfig
from snugvl.core.messages import user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.device import pooled_bytes
from snugvl.models.loader import load_model

device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
gpu = device.type == "cuda"
folder = Path(snugvl.__file__).parent / "pocket"
processor = Processor.from_folder(folder, read_config(folder))


def drawn(index: int) -> Image.Image:
    """A picture of one ellipse."""
    image = Image.new("RGB", (96 + 32 * (index % 3), 128), "white")
    ImageDraw.Draw(image).ellipse((10 + index, 10, 60 + index, 60), fill=("red", "blue", "green")[index % 3])
    return image


PROMPTS = [
    processor.prepare(
        [user(*([drawn(i)] if i % 2 else []), f"Picture {i}: what is there? " + "word " * (7 * i))]
    )
    for i in range(10)
]


def asked(name: str, prompt: PreparedPrompt, **sampling: Any) -> EngineRequest:
    """A request that doesn't end by itself."""
    return EngineRequest(name, prompt.prompt_ids, SamplingParams(ignore_eos=True, **sampling), prompt.vision)


def answers(engine: Engine, **sampling: Any) -> dict[str, list[int]]:
    """Tokens of all prompts at once, a few steps apart."""
    left = [asked(str(i), p, max_tokens=24 + i, seed=i, **sampling) for i, p in enumerate(PROMPTS)]
    said: dict[str, list[int]] = {}
    while left or engine.has_work:
        if left:
            engine.add(left.pop())
        for _ in range(3):
            for output in engine.step():
                assert output.error is None, output.error
                if output.token_id is not None:
                    said.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
    return said


def digest(said: dict[str, list[int]]) -> str:
    """A short name of these tokens."""
    return hashlib.sha256(json.dumps(sorted(said.items())).encode()).hexdigest()[:12]


def held() -> dict[str, int]:
    """Bytes of the GPU that torch holds."""
    if not gpu:
        return {}
    torch.cuda.synchronize()
    return {
        "pools": pooled_bytes(),
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def speed(engine: Engine, streams: int, **sampling: Any) -> dict[str, float]:
    """Wall time of a step, and time of the host's thread in it, µs: medians of ten rounds of 20 steps."""
    for i in range(streams):
        engine.add(asked(f"s{i}", PROMPTS[0], max_tokens=300, seed=i, **sampling))
    for _ in range(streams + 20):
        engine.step()
    wall, host = [], []
    for _ in range(10):
        begun, spent = time.perf_counter(), time.thread_time()
        for _ in range(20):
            engine.step()
        wall.append((time.perf_counter() - begun) / 20 * 1e6)
        host.append((time.thread_time() - spent) / 20 * 1e6)
    for i in range(streams):
        engine.abort(f"s{i}")
    while engine.has_work:
        engine.step()
    return {"wall": round(median(wall), 1), "host": round(median(host), 1)}


def voided(engine: Engine) -> None:
    """Forget all graphs."""
    engine._runner.graph_cache.clear()


def started(engine: Engine) -> None:
    """Record spare graphs again."""
    engine._runner.graph_cache.start()


dtype = torch.bfloat16 if gpu else torch.float32
model = load_model(folder, dtype=dtype, device=device)
config = EngineConfig(
    num_blocks=1024, max_model_len=2048, max_num_seqs=32, max_batched_tokens=512, prefix_cache=False,
    step_graph_bytes=(256 << 20) if gpu else 0,
)  # fmt: skip
found: dict[str, Any] = {"loaded": held()}
with closing(Engine(model, config)) as engine:
    while engine.capture_next():
        pass
    found["decode graphs"] = held() | {"captures": engine.stats.graph_captures}
    rounds = [digest(answers(engine)) for _ in range(3)]
    found["greedy, three rounds"] = rounds
    found["spare graphs"] = held() | {
        "captures": engine.stats.graph_captures,
        "recorded": engine.stats.recorded,
    }
    found["sampled"] = [digest(answers(engine, temperature=0.8)) for _ in range(2)]
    if gpu:
        engine._runner.graph_cache.stop()
        found["dropped"] = held() | {"recorded": engine.stats.recorded}
        found["greedy without spare graphs"] = digest(answers(engine))
        started(engine)
        found["greedy with them again"] = [digest(answers(engine)) for _ in range(3)][-1]
        found["again"] = held() | {"recorded": engine.stats.recorded}
        voided(engine)
        torch.cuda.empty_cache()
        found["voided"] = held()
        found["greedy after all were void"] = digest(answers(engine))
    kinds: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8}}
    found["µs"] = {f"{n} {kind}": speed(engine, n, **how) for n in (1, 8, 32) for kind, how in kinds.items()}
    found["faults"] = engine.stats.faults
    found["shortages"] = engine.stats.shortages
found["closed"] = held()
print(json.dumps(found, indent=1, ensure_ascii=False))
