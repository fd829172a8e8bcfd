"""The KV cache in FP8 beside bf16, on one network: speed of long contexts and error of the logits.

One request with a long prompt of random tokens, then `--new` greedy tokens, through the whole engine; the
logits of `--positions` tokens in one prefill, against those with the wide cache.

    python benchmarks/kv_formats.py CHECKPOINT [--context 16384] [--device cuda] [--out FILE]
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import machine
from snugvl.core.config import EngineConfig, KVFormat
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.memory import allocate
from snugvl.engine.request import EngineRequest
from snugvl.layers.attention import AttentionMetadata
from snugvl.models.batch import ForwardBatch
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork

FORMATS: tuple[KVFormat, ...] = ("bf16", "fp8")
BLOCK = 16


def prompt(model: LoadableNetwork, tokens: int) -> list[int]:
    """Random ids that are nobody's placeholder, the same every time."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(10, min(2000, model.config.text.vocab_size), (tokens,), generator=generator).tolist()


def logits(model: LoadableNetwork, kv: KVFormat, ids: list[int]) -> torch.Tensor:
    """Of every position, `[tokens, vocab]`, in one prefill."""
    blocks, device = -(-len(ids) // BLOCK), model.device
    cache = allocate(model, EngineConfig(num_blocks=blocks, max_num_seqs=1, kv_cache=kv))
    everything = torch.arange(len(ids), device=device)
    table = torch.arange(blocks, device=device)[None]
    where = AttentionMetadata(
        (len(ids),), (len(ids),), everything, table, BLOCK, state_slots=everything[:1] * 0
    )
    positions = everything.expand(3, -1)
    return model.forward(
        ForwardBatch(torch.tensor(ids, device=device), positions, where, everything), cache
    ).float()


def run(model: LoadableNetwork, kv: KVFormat, context: int, new: int) -> dict[str, float]:
    """Seconds to the first token, tokens per second after it, bytes of the cache."""
    blocks = -(-context // BLOCK)
    engine = Engine(model, EngineConfig(num_blocks=blocks, max_model_len=context, kv_cache=kv))
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    ids = tuple(prompt(model, context - new))
    found: list[tuple[float, float]] = []
    for name in ("warm", "first", "second", "third"):  # the first one compiles and captures
        engine.add(EngineRequest(name, ids[len(found) :], sampling))  # another beginning: nothing is cached
        start, times = time.perf_counter(), []
        while engine.has_work:
            times += [time.perf_counter() for output in engine.step() if output.token_id is not None]
        found.append((times[0] - start, (len(times) - 1) / (times[-1] - times[0])))
    return {
        "first_token_s": median(first for first, _ in found[1:]),
        "tokens_per_s": median(rate for _, rate in found[1:]),
        "cache_bytes": engine.memory()["kv_cache"],
    }


@torch.inference_mode()
def main() -> None:
    """Both formats, one after the other, on weights that are loaded once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--positions", type=int, default=1024, help="tokens whose logits are compared")
    parser.add_argument("--weights", default="bf16", help="format of the decoder's weights: bf16, fp8, …")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    print(machine.describe())
    kind = torch.float32 if given.device.type == "cpu" else torch.bfloat16
    model = load_model(given.checkpoint, dtype=kind, device=given.device, storage=Storage(given.weights))
    ids = prompt(model, given.positions)
    wide, narrow = (logits(model, kv, ids).cpu() for kv in FORMATS)
    results: dict[str, Any] = {
        "checkpoint": given.checkpoint.name,
        "context": given.context,
        "relative_logit_error": ((narrow - wide).norm() / wide.norm()).item(),
        "top1_agreement": (narrow.argmax(-1) == wide.argmax(-1)).float().mean().item(),
    }
    print(f"logits   relative error {results['relative_logit_error']:.2e}", end="")
    print(f"   top-1 {results['top1_agreement']:.4f}")
    for kv in FORMATS:
        results[kv] = row = run(model, kv, given.context, given.new)
        print(f"{kv:<9}first token {row['first_token_s'] * 1e3:7.1f} ms", end="")
        print(f"   {row['tokens_per_s']:7.1f} tokens/s   cache {row['cache_bytes'] / 2**30:.3f} GiB")
    machine.save("kv_formats", results, given.out)


if __name__ == "__main__":
    main()
