"""What `snugvl quantize` makes of SmolLM2-135M-Instruct: what it costs, by bits and by what is given.

    PYTHONPATH=benchmarks python -m training.quantized [--json FILE [--only BITS …]]
    PYTHONPATH=benchmarks python -m training.quantized --release coder --device cuda --only 4.75 --format gguf
    PYTHONPATH=benchmarks python -m training.quantized --release coder --peers libllama.so Q3_K_S IQ3_S
    PYTHONPATH=benchmarks python -m training.quantized --release coder --device cuda --exl3 SOURCES 4 3

The yardsticks are KL to float32 of the model's answers to twelve questions, and of the text of
`training/format_cost.py`. What is given with --with are answers of the model to other questions, and
beginnings of other chapters of the book that the text is from. The questions calibrate nothing and have tuned
nothing: how much the rounding trusts what it was given, and what share of earlier losses a matrix makes up
for (`quantize/rounding.py`), were chosen on the answers of `training/format_cost.py`. Checkpoints are
written, loaded again as any other, and computed in float32, so the figures are of the rounding alone; what is
rounded while loading stands beside them.

With --peers llama.cpp's own library rounds instead, as llama-quantize does, with an importance matrix of the
same texts. Embedding and head are Q8_0, as ours are. What its blocks mean to the package `gguf` is judged, so
that activations are exact there, too. With --exl3 exllamav3 rounds for the same texts (`exl3.py`).
"""

import argparse
import ctypes
import json
import pydoc_data.topics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch
from training.exl3 import exllamav3, own_rows, round_network
from training.format_cost import bits, text
from training.gguf_export import export, rewrite
from training.pocket.format_error import answered, at_answers, compared
from training.releases import RELEASES, SMOLLM2, Release

import machine
from gpu_oracle import our_logits
from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.gguf_folder import folder_of
from snugvl.core.messages import user
from snugvl.core.options import LoadOptions
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.layers.linear import Linear
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork
from snugvl.quantize import rounding, setup
from snugvl.quantize.setup import PIECE, Given, QuantizeJob

CHAPTERS = ("specialnames", "typesseq")
TOPICS = (
    "volcanoes", "the Roman Empire", "electric cars", "jazz music", "coffee", "the human brain", "vaccines",
    "chess", "the Great Wall of China", "honey bees", "glaciers", "the printing press", "yoga", "solar power",
    "whales", "the Renaissance", "bread baking", "football", "the stock market", "dinosaurs", "poetry",
    "earthquakes", "robots", "tea", "the French Revolution", "gravity", "forests", "ballet", "the internet",
    "cheese", "migration of birds", "mathematics", "castles", "sleep", "recycling", "the Moon landing",
    "rice", "languages", "mountains", "photography", "ants", "trains", "the Olympics", "chocolate", "rivers",
    "libraries", "clocks", "dogs",
)  # fmt: skip
FORMS = (
    "Tell me about {}.",
    "What are three interesting facts about {}?",
    "Write a short story that involves {}.",
    "Explain {} to a ten year old.",
)
AT_ONCE = 16
CHARACTERS = 2000  # of a chapter
HELD_OUT = (
    "Why do leaves change colour in autumn?", "Write a short poem about a lighthouse.",
    "What is the capital of Japan, and what is it known for?", "Explain to a child how an aeroplane flies.",
    "Give me a recipe for tomato soup.", "What is the difference between weather and climate?",
    "Summarise the story of Little Red Riding Hood in a few sentences.", "How do I read a file in Python?",
    "Name five musical instruments and how they are played.", "What should I pack for a day at the beach?",
    "Describe a busy train station.", "What causes tides?",
)  # fmt: skip
LOADED: Mapping[str, Storage] = {
    "`--weights int4` in groups of 64, while loading": Storage("int4", group=64),
    "`--weights int5`, while loading": Storage("int5"),
    "`--weights int6`, while loading": Storage("int6"),
}


PARTS = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"), "self_attn.o_proj": ("attn_output",),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"), "mlp.down_proj": ("ffn_down",),
}  # fmt: skip
BITS = (4.5, 4.75, 5.5)
FORMATS = ("snugvl", "gguf")
GPU_ROWS = 1 << 15  # that are rounded together on a large GPU, where steps are launched and not computed


def given(release: Release, processor: Processor, model: LoadableNetwork, every: int = 1) -> Given:
    """Conversations about other things, each `every`-th of them, and other chapters."""
    questions = [FORMS[number % len(FORMS)].format(topic) for number, topic in enumerate(TOPICS)][::every]
    kept = release.cache / ("quantized" if every == 1 else f"quantized-{every}")
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=release.cache) as work:
            made = Path(work) / "made"
            made.mkdir()
            for number, conversation in enumerate(_conversations(processor, model, questions)):
                (made / f"{number:03}.txt").write_text(conversation)
            made.rename(kept)
    texts = [(path.name, path.read_text()) for path in sorted(kept.glob("*.txt"))]
    return Given(texts=[*texts, *((name, pydoc_data.topics.topics[name][:CHARACTERS]) for name in CHAPTERS)])


def _conversations(processor: Processor, model: LoadableNetwork, questions: list[str]) -> Iterator[str]:
    for first in range(0, len(questions), AT_ONCE):
        prompts = [processor.prepare([user(each)]) for each in questions[first : first + AT_ONCE]]
        answers = answered(model, prompts, processor.tokenizer.eos_ids)
        for prompt, answer in zip(prompts, answers, strict=True):
            yield processor.tokenizer.decode([*prompt.prompt_ids, *answer], skip_special=False)


def pieces(processor: Processor, texts: Given) -> Iterator[tuple[int, ...]]:
    """Token ids of texts, as many at once as `snugvl quantize` reads together."""
    for _, each in texts.texts:
        ids = tuple(processor.tokenizer.encode(each))
        yield from (ids[start : start + PIECE] for start in range(0, len(ids), PIECE))


def as_written(out: Path, device: torch.device) -> tuple[LoadableNetwork, float]:
    """(what the command wrote, in float32; bits of a weight as it is held)."""
    files = gguf_files(str(out))
    folder = out if files is None else folder_of(files)
    model = load_model(folder, dtype=torch.float32, device=device)
    held = bits(model)
    for each in model.modules():  # products in float32 are plain ones, on any device
        if isinstance(each, Linear) and each.format == "ggml":
            wide = each.weights.wide(torch.float32)
            each.format, each.parts = "bf16", ()
            each.weight = torch.nn.Parameter(wide, requires_grad=False)
    return model, held


class ImportanceRow(ctypes.Structure):
    """llama.cpp's `llama_model_imatrix_data`: a tensor's name, importances of its columns, their number."""

    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class QuantizeParameters(ctypes.Structure):
    """llama.cpp's `llama_model_quantize_params`, of the autumn of 2026."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("threads", "ftype", "output", "embedding")),
        *((name, ctypes.c_bool) for name in ("again", "with_output", "copy", "pure", "split", "dry")),
        ("importance", ctypes.POINTER(ImportanceRow)),
        *((name, ctypes.c_void_p) for name in ("values", "types", "pruned")),
        ("buffer", ctypes.c_size_t),
    )


def importance(model: LoadableNetwork, processor: Processor, texts: Given) -> dict[str, torch.Tensor]:
    """The mean square of each column's input, `[columns]`, by the name that a GGUF gives the matrix."""
    found: dict[str, torch.Tensor] = {}
    counts = Counter[str]()

    def seen(names: tuple[str, ...], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        norm = kwargs.get("norm")
        x = (args[0] if norm is None else norm(args[0])).flatten(0, -2).float()
        sums = x.square().sum(0)
        for name in names:
            found[name] = found[name] + sums if name in found else sums
            counts[name] += len(x)

    hooks = [
        layer.get_submodule(ours).register_forward_pre_hook(
            partial(seen, tuple(f"blk.{index}.{each}.weight" for each in theirs)), with_kwargs=True
        )
        for index, layer in enumerate(model.decoder.layers)
        for ours, theirs in PARTS.items()
    ]
    for piece in pieces(processor, texts):
        our_logits(model, PreparedPrompt(piece, (), 0, bare=True), "bf16")
    for hook in hooks:
        hook.remove()
    return {name: (each / counts[name]).contiguous() for name, each in found.items()}


def rounded_by_peer(
    library: Path, source: Path, out: Path, kind: str, rows: Mapping[str, torch.Tensor]
) -> tuple[float, Counter[str]]:
    """Let llama.cpp round the GGUF `source` to a type of file; what it means is written to `out`, in float32.

    Returns:
        Bits of a weight of the decoder's matrices, and how many of them are of which type.
    """
    given = [ImportanceRow(name.encode(), each.data_ptr(), len(each)) for name, each in rows.items()]
    llama = ctypes.CDLL(str(library))
    llama.llama_model_quantize_default_params.restype = QuantizeParameters
    wanted = llama.llama_model_quantize_default_params()
    wanted.threads, wanted.ftype = torch.get_num_threads(), gguf.LlamaFileType[f"MOSTLY_{kind}"]
    wanted.output = wanted.embedding = gguf.GGMLQuantizationType.Q8_0
    wanted.importance = (ImportanceRow * (len(given) + 1))(*given)
    made = out.with_suffix(".blocks")
    parameters = ctypes.byref(wanted)
    if llama.llama_model_quantize(str(source).encode(), str(made).encode(), parameters):
        raise SystemExit(f"llama.cpp could not round {source} to {kind}")
    inner = [each for each in gguf.GGUFReader(made).tensors if each.name in rows]
    rewrite(made, out, lambda each: (gguf.quants.dequantize(each.data, each.tensor_type), None))
    made.unlink()
    bits_held = 8 * sum(int(each.n_bytes) for each in inner) / sum(int(each.n_elements) for each in inner)
    return bits_held, Counter(each.tensor_type.name for each in inner)


def begun(release: Release, answer_tokens: int, file: Path | None) -> dict[str, Any]:
    """Results to which rows are added: those of `file`, its machine included, where it is there already.

    Raises:
        SystemExit: the file's rows were judged on other answers.
    """
    made: dict[str, Any] = {"model": release.filename, "answer_tokens": answer_tokens, "ways": {}}
    if file is None or not file.exists():
        return made
    kept: dict[str, Any] = json.loads(file.read_text())
    if any(kept[name] != made[name] for name in ("model", "answer_tokens")):
        raise SystemExit(
            f"{file} has rows of {kept['model']}, {kept['answer_tokens']} tokens of answers; "
            f"these are of {made['model']}, {answer_tokens}: name another --json"
        )
    return kept


@torch.inference_mode()
def main() -> None:
    """Every way, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", nargs="+", type=float, metavar="BITS", help="so many alone; other rows of FILE stay"
    )
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="calibrate on every Nth conversation alone"
    )
    parser.add_argument("--peers", nargs="+", metavar="LIBRARY TYPE", help="llama.cpp's library, and types")
    parser.add_argument("--exl3", nargs="+", metavar="SOURCES BITS", help="exllamav3's sources, and bits")
    parser.add_argument("--layers", type=int, metavar="N", help="of --exl3: so many of them alone")
    parser.add_argument("--own-rows", type=int, metavar="N", help="of --exl3: so many of its texts, not ours")
    parser.add_argument("--release", choices=list(RELEASES), default=SMOLLM2.name)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    asked = parser.parse_args()
    print(machine.describe())
    sources, *means = asked.exl3 or ("",)
    peer = exllamav3(Path(sources)) if means else None
    release: Release = RELEASES[asked.release]
    folder, device = release.shuffled(), asked.device
    processor = Processor.from_folder(folder, read_config(folder))
    exact_model = load_model(folder, dtype=torch.float32, device=device)
    prompts = [processor.prepare([user(question)]) for question in HELD_OUT]
    answers = answered(exact_model, prompts, processor.tokenizer.eos_ids)
    texts = given(release, processor, exact_model, asked.every)
    whole = text(processor).prompt_ids
    opening, rest = PreparedPrompt(whole[:1], (), 0, bare=True), whole[1:]

    def logits(model: LoadableNetwork) -> tuple[torch.Tensor, torch.Tensor]:
        return at_answers(model, prompts, answers, "bf16"), at_answers(model, [opening], [rest], "bf16")

    exact = logits(exact_model)
    library, *types = asked.peers or ("",)
    important = importance(exact_model, processor, texts) if types else {}
    del exact_model
    added = asked.only is not None or peer is not None or bool(types)
    results = begun(release, len(exact[0]), asked.json if added else None)

    def judged(name: str, model: LoadableNetwork, held: float, more: dict[str, Any]) -> None:
        ours = logits(model)
        row = compared(ours[0], exact[0]) | {"text_kl_nats": compared(ours[1], exact[1])["kl_nats"]}
        row |= {"bits": held, "machine": machine.describe()} | more
        results["ways"][name] = row
        print(f"{name:<56}{row['kl_nats']:>9.4f}{row['top1_agreement']:>8.1%}", end="")
        print(f"{row['text_kl_nats']:>10.4f}{row['bits']:>7.2f}  {more.get('widths', '')}", flush=True)

    print(f"{'':<56}{'KL':>9}{'top-1':>8}{'KL, text':>10}{'held':>7}  widths")
    with tempfile.TemporaryDirectory(dir=release.cache) as work:
        source, out = Path(work) / "wide.gguf", Path(work) / "out.gguf"
        if types:
            export(str(folder), source)
        for kind in types:
            held, counts = rounded_by_peer(Path(library), source, out, kind, important)
            model = as_written(out, device)[0]
            judged(f"llama.cpp's {kind}, importance matrix", model, held, {"types": dict(counts)})
            del model
            machine.save(f"{release.name}/quantized", results, asked.json)
    if peer is not None:
        ids = [*pieces(processor, texts)]
        if asked.own_rows:
            ids = own_rows(peer, processor.tokenizer.encode, asked.own_rows)
        some = f", {asked.layers} layers" if asked.layers else ""
        some += ", its own texts" if asked.own_rows else ""
        for mean in map(float, means):
            model = load_model(folder, dtype=torch.float32, device=device)
            held = round_network(peer, model, folder, ids, mean, asked.layers)
            judged(f"EXL3, {mean:g} bits{some}", model, held, {"calibration_tokens": sum(map(len, ids))})
            machine.save(f"{release.name}/quantized", results, asked.json)
    if types or peer:
        return
    for name, storage in LOADED.items() if asked.only is None else ():
        model = load_model(folder, dtype=torch.float32, device=device, storage=storage)
        judged(name, model, bits(model), {})
    for mean, form in product(BITS if asked.only is None else asked.only, asked.format):
        with tempfile.TemporaryDirectory(dir=release.cache) as work:
            out, options = Path(work) / "out", LoadOptions(str(folder), device=device.type)
            said = {"bits": mean, "group": None, "as_gguf": form == "gguf"}
            rows = GPU_ROWS if device.type == "cuda" else rounding.SLICE_ROWS
            with (
                mock.patch.multiple(rounding, SLICE_ROWS=rows),
                mock.patch.multiple(setup, SLICE_ROWS=rows),
                closing(QuantizeJob(options, out, texts, tell=lambda *_: None, **said)) as job,
            ):
                made = job.run()
            counts = Counter(made.widths.values())
            widths = {str(each): counts[each] for each in sorted(counts)}
            more = {"widths": widths, "seconds": made.seconds}
            name = f"`--bits {mean:g} --with texts/`{'' if form == 'snugvl' else ' `--format gguf`'}"
            judged(name, *as_written(out, device), more)
        results["calibration_tokens"] = job.material.tokens
        machine.save(f"{release.name}/quantized", results, asked.json)  # after each: all take half an hour


if __name__ == "__main__":
    main()
