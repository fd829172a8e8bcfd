"""The second turn of a long conversation with pictures, on a model with recurrent states.

    python benchmarks/second_turn.py CHECKPOINT bf16|fp8|int8+int8|int4+int8 [--dtype float32] [--out FILE]
    python benchmarks/second_turn.py TINY bf16 --device cpu --dtype float32 --tokens 2000 --side 256

Four user turns, a picture of noise and text each, make the first prompt (16,384 tokens); the second has the
answer to it and a short question besides. Its time to the first token, cold (no prefix cache) and after the
first turn; a new picture's, and that of a second question about it. Then another program takes the memory
and gives it back: the checkpoints of states are gone with the cache, and tokens must be the same. Medians of
`--runs` conversations. In bf16 near ties, of which random weights have many, may fall otherwise where a
prompt is cut otherwise: `--dtype float32` shows that the tokens are equal. `--graphs MIB` is memory for CUDA
graphs of steps with prompts, which `snugvl serve` has where there is room for them.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image

import machine
from snugvl.checkpoint.families import read_config
from snugvl.core.config import EngineConfig
from snugvl.core.messages import Message, Text, user
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.pressure import PATIENCE_S, DeviceMemory, PlannedBytes, PressureMonitor
from snugvl.engine.request import EngineRequest
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import Storage, load_model

PLENTY = 1 << 40
ROUNDS = 20  # of an engine that looks at what is free, until it has done all about it


class Bench:
    """Two engines on one network, and a card of which another program takes memory when it is told to."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.told, self.free_bytes, self.now = told, PLENTY, 0.0
        layers, _, head = told.formats.partition("+")
        dtype, storage = getattr(torch, told.dtype), Storage(layers=layers, head=head or "bf16")
        self.processor = Processor.from_folder(told.folder, read_config(told.folder))
        network = load_model(told.folder, dtype=dtype, device=torch.device(told.device), storage=storage)
        sizes = EngineConfig(
            num_blocks=told.tokens // 4, max_model_len=2 * told.tokens, max_num_seqs=4,
            max_batched_tokens=told.chunk, state_checkpoints=8, encoder_cache_bytes=64 << 20,
            step_graph_bytes=told.graphs << 20,
        )  # fmt: skip
        monitor = PressureMonitor(
            lambda: DeviceMemory(self.free_bytes, 0), PlannedBytes(0), clock=lambda: self.now
        )
        self.warm = Engine(network, sizes, monitor)
        self.cold = Engine(network, replace(sizes, prefix_cache=False))

    def conversation(self, seed: int) -> list[Message]:
        """Four turns with about as many tokens as were told."""
        draw, side = np.random.default_rng(seed), self.told.side
        words = (self.told.tokens - 4 * (side // 32) ** 2) // 4 - 20
        found: list[Message] = []
        for _ in range(4):
            noise = Image.fromarray(draw.integers(0, 255, (side, side, 3), dtype=np.uint8))
            text = " ".join(draw.choice(["red", "house", "the", "water"], words))
            found += [user(noise, text), Message("assistant", (Text("Yes."),))]
        return found[:-1]

    def ask(self, engine: Engine, messages: list[Message]) -> tuple[float, list[int], int]:
        """Seconds to the first token, the tokens, and how many of the prompt's were found."""
        prompt, found = self.processor.prepare(messages), engine.stats.prefix_hit_tokens
        sampling = SamplingParams(max_tokens=self.told.answer, ignore_eos=True)
        stops = frozenset(self.processor.tokenizer.eos_ids)
        start, first, tokens = time.perf_counter(), 0.0, list[int]()
        engine.add(EngineRequest("r", prompt.prompt_ids, sampling, prompt.vision, stops))
        while engine.has_work:
            tokens += [output.token_id for output in engine.step() if output.token_id is not None]
            first = first or (time.perf_counter() - start if tokens else 0.0)
        return first, tokens, engine.stats.prefix_hit_tokens - found

    def squeeze(self) -> None:
        """Another program takes all that it gets, and gives it back."""
        for free in (0, PLENTY):
            self.free_bytes = free
            for _ in range(ROUNDS):
                self.now += PATIENCE_S
                self.warm.poll_memory()

    def run(self, seed: int) -> dict[str, float]:
        """One conversation, all of it."""
        first = self.conversation(seed)
        said = Text(self.processor.tokenizer.decode(self.ask(self.warm, first)[1]))
        second = [*first, Message("assistant", (said,)), user("What colour is the house?")]
        warm_s, tokens, found = self.ask(self.warm, second)
        cold_s, right, _ = self.ask(self.cold, second)
        picture = self.conversation(seed + 1000)[0].content[0]
        new_s, same_s = (self.ask(self.warm, [user(picture, text)])[0] for text in ("What?", "Why is it so?"))
        self.squeeze()
        after_s, after, left = self.ask(self.warm, second)
        assert left == 0, "what was given back was found"
        again_s, again, _ = self.ask(self.warm, second)
        return {
            "cold_s": cold_s, "second_turn_s": warm_s, "found": found, "equal": tokens == right,
            "after_pressure_s": after_s, "again_s": again_s, "equal_after": right == after == again,
            "new_picture_s": new_s, "same_picture_s": same_s,
        }  # fmt: skip


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", help="layers, or layers+head")
    for name, default in {"device": "cuda", "dtype": "bfloat16", "tokens": 16384, "side": 1024, "answer": 64,
                          "runs": 3, "chunk": 2048, "graphs": 0, "out": Path()}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    told = parser.parse_args()
    bench = Bench(told)
    bench.run(997)  # compiles and captures
    rows = [bench.run(seed) for seed in range(told.runs)]
    found = {name: median(row[name] for row in rows) for name in rows[0]}
    found["ratio"] = found["second_turn_s"] / found["cold_s"]
    print(*(f"{name:18}{value:10.4f}" for name, value in found.items()), sep="\n")
    name = f"h200/second_turn_{told.folder.name}_{told.formats}_{told.dtype}"
    values = {"told": {key: str(value) for key, value in vars(told).items()}, "median": found, "runs": rows}
    machine.save(name, values, told.out if told.out.name else None)


if __name__ == "__main__":
    main()
