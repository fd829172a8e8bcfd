"""What a format of weights and of the KV cache costs a real language model: SmolLM2-135M-Instruct.

    PYTHONPATH=benchmarks python -m training.format_cost [--json FILE]

As `training/pocket/format_error.py` does it with pocket: the model in float32 answers questions, every format
is given the same answers, and its logits at each of their tokens are compared with float32's. Besides, every
format reads a text that nobody made for it (the chapter on objects of the language reference that Python
carries), which gives a perplexity.

    KL       nats a token, from float32's distribution to this one; of the answers, and of the text
    top-1    tokens whose most likely successor stays the same, of the answers
    ppl      perplexity of the text
    bits     of a weight of the decoder's matrices, with its scales and zero points

The weights are SmolLM2's with their channels in another order (`smollm2.shuffled`): as published, they are
4-bit values in groups of 32, which a format with just these groups would find again.

A matrix whose columns don't divide into groups stays wide. SmolLM2's hidden size is 576, so int8 and groups
of 128 are of `down_proj` alone (1,536 columns), the head stays wide, and blocks of FP8 don't fit at all.
"""

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from training.pocket.format_error import Way, answered, at_answers, compared

import machine
from snugvl.checkpoint.families import read_config
from snugvl.core.messages import user
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.linear import Linear
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork
from training import smollm2

TEXT_TOKENS = 1700
WAYS = (
    Way("bf16"),
    Way("int8 (down_proj alone)", Storage("int8")),
    Way("int6", Storage("int6")),
    Way("int5", Storage("int5")),
    Way("int4, groups of 32", Storage("int4", group=32)),
    Way("int4, groups of 64", Storage("int4", group=64)),
    Way("int4, groups of 128 (down_proj alone)", Storage("int4", group=128)),
    Way("bf16, FP8 KV cache", kv="fp8"),
)


def bits(model: LoadableNetwork) -> float:
    """Of a weight of the decoder's matrices."""
    matrices = [each for each in model.decoder.layers.modules() if isinstance(each, Linear)]
    held = sum(each.weights.nbytes for each in matrices)
    return 8 * held / sum(each.rows * each.columns for each in matrices)


def text(processor: Processor) -> PreparedPrompt:
    """The text as one prompt; its tokens but the first are what is predicted."""
    ids = processor.tokenizer.encode(
        pydoc_data.topics.topics["objects"] + pydoc_data.topics.topics["execmodel"]
    )
    return PreparedPrompt(tuple(ids[:TEXT_TOKENS]), (), 0, bare=True)


@torch.inference_mode()
def main() -> None:
    """Every format, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(machine.describe())
    folder = smollm2.shuffled()
    processor = Processor.from_folder(folder, read_config(folder))
    device = torch.device("cpu")
    exact_model = load_model(folder, dtype=torch.float32, device=device)
    prompts = [processor.prepare([user(question)]) for question in smollm2.QUESTIONS]
    answers = answered(exact_model, prompts, processor.tokenizer.eos_ids)
    whole = text(processor)
    opening, rest = PreparedPrompt(whole.prompt_ids[:1], (), 0, bare=True), whole.prompt_ids[1:]

    def logits(way: Way, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the answers and of the text."""
        return (
            at_answers(model, prompts, answers, way.kv),
            at_answers(model, [opening], [rest], way.kv),
        )

    def perplexity(found: torch.Tensor) -> float:
        return torch.nn.functional.cross_entropy(found, torch.tensor(rest)).exp().item()

    exact = logits(Way("fp32"), exact_model)
    del exact_model
    results: dict[str, Any] = {
        "model": smollm2.PACKAGE,
        "answer_tokens": len(exact[0]),
        "text_tokens": len(exact[1]),
        "fp32_perplexity": perplexity(exact[1]),
        "formats": {},
    }
    print(f"{len(exact[0]):,} tokens of answers, {len(exact[1]):,} of text; ", end="")
    print(f"perplexity in float32 {results['fp32_perplexity']:.2f}")
    print(f"{'':<40}{'KL':>10}{'top-1':>9}{'KL, text':>10}{'ppl':>8}{'bits':>7}")
    for way in WAYS:
        model = load_model(folder, dtype=way.dtype, device=device, storage=way.storage)
        ours = logits(way, model)
        row = compared(ours[0], exact[0])
        row |= {"bits": bits(model)}
        row |= {"text_kl_nats": compared(ours[1], exact[1])["kl_nats"], "perplexity": perplexity(ours[1])}
        results["formats"][way.name] = row
        print(f"{way.name:<40}{row['kl_nats']:>10.5f}{row['top1_agreement']:>9.2%}", end="")
        print(f"{row['text_kl_nats']:>10.5f}{row['perplexity']:>8.2f}{row['bits']:>7.2f}", flush=True)
    machine.save("smollm2/format_cost", results, given.json)


if __name__ == "__main__":
    main()
