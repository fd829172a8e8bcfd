"""What a format of weights and of the KV cache costs a released language model.

    PYTHONPATH=benchmarks python -m training.format_cost [--release smollm2] [--json FILE]
    PYTHONPATH=benchmarks python -m training.format_cost --release coder --device cuda --prompts 200

As `training/pocket/format_error.py` does it with pocket: the model in float32 answers questions, every format
is given the same answers, and its logits at each of their tokens are compared with float32's. Besides, every
format reads a text that nobody made for it (the chapter on objects of the language reference that Python
carries), which gives a perplexity, and answers the questions itself.

    KL       nats a token, from float32's distribution to this one; of the answers, and of the text
    top-1    tokens whose most likely successor stays the same, of the answers
    ppl      perplexity of the text
    bits     of a weight of the decoder's matrices, with its scales and zero points
    equal    answers that are float32's, token by token; of the others, those that part where float32 gave
             the token that was taken a tenth of a nat less than its own at most ("ties")

The weights are the model's with their channels in another order (`Release.shuffled`): as published, they are
4-bit values in groups of 32, which a format with just these groups would find again. The GGUF itself is read
as it is.

A matrix whose columns don't divide into groups stays wide. SmolLM2's hidden size is 576, so int8 and groups
of 128 are of `down_proj` alone (1,536 columns), the head stays wide, and blocks of FP8 don't fit at all.
With `--transformers` its float32 answers are compared with ours first.
"""

import argparse
import json
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from training.pocket.format_error import Way, answered, at_answers, compared, fp8_copy, rounded_inputs
from training.releases import QUESTIONS, RELEASES, SMOLLM2, Release

import machine
from snugvl.bench.workload import WORDS
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.gguf_folder import folder_of
from snugvl.core.messages import user
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.linear import Linear
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork

TEXT_TOKENS = 1700
TIE_NATS = 0.1
GGUF = "the GGUF as it is"
AT_ONCE = 25  # prompts that transformers answers together
ASKED = (
    "What is a {}?", "Write a sentence about the word {}.", "Write a Python function about a {}.",
    "Say {} in French.", "Name three things that are like a {}.",
)  # fmt: skip
WAYS = {
    "smollm2": (
        Way("bf16"),
        Way("int8 (down_proj alone)", Storage("int8")),
        Way("int6", Storage("int6")),
        Way("int5", Storage("int5")),
        Way("int4, groups of 32", Storage("int4", group=32)),
        Way("int4, groups of 64", Storage("int4", group=64)),
        Way("int4, groups of 128 (down_proj alone)", Storage("int4", group=128)),
        Way("bf16, FP8 KV cache", kv="fp8"),
    ),
    "coder": (
        Way("bf16"),
        Way("fp8", Storage("fp8")),
        Way("int8", Storage("int8")),
        Way("int6", Storage("int6")),
        Way("int5", Storage("int5")),
        Way("int4, groups of 64", Storage("int4", group=64)),
        Way("int4, groups of 128", Storage("int4")),
        Way("int4, inputs of 15 bits", Storage("int4"), inputs="15 bits"),
        Way("int4, inputs of 8 bits", Storage("int4"), inputs="8 bits"),
        Way("bf16, FP8 KV cache", kv="fp8"),
        Way("int4, groups of 32", Storage("int4", group=32)),
        Way("bf16, int8 head", Storage(head="int8")),
    ),
}


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


def questions(count: int) -> Iterator[str]:
    """The questions of all, and so many more that no two are alike."""
    yield from QUESTIONS[:count]
    for index in range(count - len(QUESTIONS)):
        yield ASKED[index % len(ASKED)].format(WORDS[index // len(ASKED) % len(WORDS)])


Answers = Sequence[tuple[int, ...]]


def parted(ours: Answers, exact: Answers, logits: torch.Tensor) -> dict[str, int]:
    """How many answers are equal to `exact`, and how many part at a tie of its `logits` `[tokens, vocab]`."""
    found, first = {"answers": len(exact), "equal": 0, "ties": 0}, 0
    for mine, theirs in zip(ours, exact, strict=True):
        at = next((i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
        if at is None:
            found["equal"] += len(mine) == len(theirs)
        else:
            row = logits[first + at]
            found["ties"] += bool(row[theirs[at]] - row[mine[at]] <= TIE_NATS)
        first += len(theirs)
    return found


def by_transformers(
    folder: Path, prompts: Sequence[PreparedPrompt], longest: int, ends: Sequence[int]
) -> Answers:
    """Greedy answers of transformers in float32, on a GPU, `AT_ONCE` at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    answers: list[tuple[int, ...]] = []
    for start in range(0, len(prompts), AT_ONCE):
        some = [list(prompt.prompt_ids) for prompt in prompts[start : start + AT_ONCE]]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(each)) + each for each in some], device="cuda")
        seen = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in some], device="cuda")
        made = model.generate(
            ids, attention_mask=seen, do_sample=False, max_new_tokens=longest, eos_token_id=list(ends),
            pad_token_id=ends[0], repetition_penalty=1.0, temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        for row in made[:, width:].tolist():
            stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            answers.append(tuple(row[:stop]))
    return answers


class Judge:
    """The model in float32, and what others are compared with."""

    def __init__(self, release: Release, device: torch.device, prompts: int) -> None:
        self.release, self.device = release, device
        self.folder = release.shuffled()
        self.processor = Processor.from_folder(self.folder, read_config(self.folder))
        model = load_model(self.folder, dtype=torch.float32, device=device)
        self.prompts = [self.processor.prepare([user(question)]) for question in questions(prompts)]
        self.answers = answered(model, self.prompts, self.processor.tokenizer.eos_ids)
        whole = text(self.processor)
        self.opening = PreparedPrompt(whole.prompt_ids[:1], (), 0, bare=True)
        self.rest = whole.prompt_ids[1:]
        self.exact, self.exact_text = self._logits(model, "bf16")

    def _logits(self, model: LoadableNetwork, kv: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the answers and of the text, `[tokens, vocab]`."""
        found = at_answers(model, self.prompts, self.answers, kv)
        return found, at_answers(model, [self.opening], [self.rest], kv)

    def perplexity(self, logits: torch.Tensor) -> float:
        """Perplexity of the text by these logits."""
        wanted = torch.tensor(self.rest, device=logits.device)
        return torch.nn.functional.cross_entropy(logits, wanted).exp().item()

    def judged(self, model: LoadableNetwork, kv: Any, *, greedy: bool) -> dict[str, Any]:
        """The figures of one format."""
        ours, ours_text = self._logits(model, kv)
        row: dict[str, Any] = compared(ours, self.exact)
        row |= {"bits": bits(model), "text_kl_nats": compared(ours_text, self.exact_text)["kl_nats"]}
        row |= {"perplexity": self.perplexity(ours_text)}
        if greedy:
            mine = answered(model, self.prompts, self.processor.tokenizer.eos_ids, kv)
            row["greedy"] = parted(mine, self.answers, self.exact)
        return row


def show(name: str, row: dict[str, Any]) -> None:
    """One format, in a line."""
    print(f"{name:<40}{row['kl_nats']:>10.5f}{row['top1_agreement']:>9.2%}", end="")
    print(f"{row['text_kl_nats']:>10.5f}{row['perplexity']:>8.2f}{row['bits']:>7.2f}", end="")
    if greedy := row.get("greedy"):
        print(f"{greedy['equal']:>6} of {greedy['answers']}, {greedy['ties']} at ties", end="")
    print(f"  {row['seconds']:.0f} s" if "seconds" in row else "", flush=True)


@torch.inference_mode()
def main() -> None:
    """Every format, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--release", choices=list(RELEASES), default=SMOLLM2.name)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--greedy", action="store_true", help="every format answers, too")
    parser.add_argument("--transformers", action="store_true", help="its answers beside ours in float32")
    parser.add_argument(
        "--only", nargs="+", metavar="FORMAT", help="these alone; other rows of the JSON stay"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(machine.describe())
    release: Release = RELEASES[given.release]
    ways = [way for way in WAYS[release.name] if not given.only or way.name in given.only]
    before = json.loads(given.json.read_text()) if given.only and given.json and given.json.exists() else {}
    judge = Judge(release, given.device, given.prompts)
    results: dict[str, Any] = {
        "model": release.filename,
        "answer_tokens": len(judge.exact),
        "text_tokens": len(judge.exact_text),
        "fp32_perplexity": judge.perplexity(judge.exact_text),
        "formats": before.get("formats", {}),
    } | {name: before[name] for name in ("transformers",) if name in before}
    print(f"{len(judge.exact):,} tokens of answers, {len(judge.exact_text):,} of text; ", end="")
    print(f"perplexity in float32 {results['fp32_perplexity']:.2f}", flush=True)
    if given.transformers:
        ends = sorted(judge.processor.tokenizer.eos_ids)
        theirs = by_transformers(judge.folder, judge.prompts, max(map(len, judge.answers)), ends)
        results["transformers"] = parted(theirs, judge.answers, judge.exact)
        print(f"transformers in float32: {results['transformers']}", flush=True)
    print(f"{'':<40}{'KL':>10}{'top-1':>9}{'KL, text':>10}{'ppl':>8}{'bits':>7}")
    fp8 = release.cache / "fp8"
    for way in ways:
        began, storage, folder = time.perf_counter(), way.storage, judge.folder
        if storage.layers == "fp8":
            folder = fp8 if fp8.exists() else fp8_copy(fp8, judge.folder)
        model = load_model(folder, dtype=way.dtype, device=given.device, storage=storage)
        with rounded_inputs(way.inputs) if way.inputs else nullcontext():
            row = judge.judged(model, way.kv, greedy=given.greedy)
        results["formats"][way.name] = row | {"seconds": time.perf_counter() - began}
        show(way.name, results["formats"][way.name])
        del model
        machine.save(f"{release.name}/format_cost", results, given.json)
    if release is not SMOLLM2 and (not given.only or GGUF in given.only):
        began = time.perf_counter()
        files = gguf_files(str(release.file()))
        assert files is not None
        model = load_model(folder_of(files), dtype=torch.bfloat16, device=given.device)
        row = judge.judged(model, "bf16", greedy=given.greedy)
        results["formats"][GGUF] = row | {"seconds": time.perf_counter() - began}
        show(GGUF, results["formats"][GGUF])
        machine.save(f"{release.name}/format_cost", results, given.json)


if __name__ == "__main__":
    main()
