"""Trials of other roundings on single layers of Qwen2.5-Coder-1.5B-Instruct, on one core of a CPU.

    PYTHONPATH=.:src:benchmarks python -m training.better_bits WORK answers
    PYTHONPATH=.:src:benchmarks python -m training.better_bits WORK collect
    PYTHONPATH=.:src:benchmarks python -m training.better_bits WORK alone --layers 14 --ways base folded
    PYTHONPATH=.:src:benchmarks python -m training.better_bits WORK layer --layers 14 --ways base rotated
    PYTHONPATH=.:src:benchmarks python -m training.better_bits WORK peer --layers 14
    PYTHONPATH=.:src:benchmarks python -m training.better_bits WORK several --layers 2 9 --ways ggml-Q3_K

A whole model takes more than an hour there, a layer two minutes: all but the chosen one stay exact, so
figures are comparable among themselves, and small. `answers` asks the model in bf16, `collect` passes
calibration texts and held-out tokens (answers, and the beginning of the text of `training/format_cost.py`)
through the exact network once, and keeps the hidden states before each chosen layer. Each way is judged by

    KL       nats a token, from the exact network to the one in which this layer alone is rounded (`layer`)
    lost     for each matrix, the mean square of what its outputs lose on held-out inputs, relative (`alone`:
             each matrix behind exact ones, some rows of the large ones)

`several` rounds each of these layers behind exact ones, keeps what comes of it in WORK, so that it may be
ended and go on, and judges the network in which all of them are rounded.

`peer` rounds with ggml's own code (out of the wheel xllamacpp) to the types that the released file has, with
those mean squares as importance matrix, which is what llama-quantize does with an --imatrix of such texts.
"""

import argparse
import ctypes
import json
import math
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from training.releases import CODER

from snugvl.core import formats
from snugvl.core.formats import FORMATS, Format, integer_of
from snugvl.layers.ggml import LAYOUTS, ggml_type
from snugvl.layers.weights import to_few_bits
from snugvl.quantize import rounding
from snugvl.quantize.grids import Grid, Lines

HELD_OUT, TEXT_TOKENS, CHARACTERS = 12, 600, 2000
CHAPTERS = ("specialnames", "typesseq")
RELEASED = "Q4_K_M"
PIECE, EVERY = 512, 2  # of the calibration texts every second is taken, unless --every says otherwise
NAMES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
STORED = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


class Network:
    """The release in float32, its weights read from the file when they are needed."""

    def __init__(self) -> None:
        folder = CODER.shuffled()
        self.config = json.loads((folder / "config.json").read_text())
        self.file: Any = safe_open(folder / "model.safetensors", "pt")
        self.heads, self.kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.hidden, self.depth = self.config["hidden_size"], self.config["num_hidden_layers"]
        self.dim = self.hidden // self.heads

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file."""
        found: torch.Tensor = self.file.get_tensor(name)
        return found

    def layer(self, index: int) -> "Layer":
        """A decoder layer."""
        within = f"model.layers.{index}."
        weights = {
            name: torch.cat([self.tensor(f"{within}{part}.weight") for part in parts])
            for name, parts in STORED.items()
        }
        bias = torch.cat([self.tensor(f"{within}{part}.bias") for part in STORED["qkv_proj"]])
        norms = [self.tensor(f"{within}{each}_layernorm.weight") for each in ("input", "post_attention")]
        return Layer(self, weights, bias, *norms)

    def embedded(self, ids: Sequence[int]) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` before the first layer."""
        return self.tensor("model.embed_tokens.weight")[list(ids)]

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` over its root mean square."""
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()

    def log_probs(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities `[tokens, vocab]` of the last hidden states."""
        x = self.normed(x) * self.tensor("model.norm.weight")
        return linear(x, self.tensor("lm_head.weight")).log_softmax(-1)


@dataclass(slots=True)
class Layer:
    """A decoder layer of Qwen2: weights by name, the bias of queries, keys and values, two norms."""

    network: Network
    weights: dict[str, torch.Tensor]
    bias: torch.Tensor
    before: torch.Tensor
    behind: torch.Tensor

    def attended(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Inputs of `o_proj` for the normed inputs of `qkv_proj`; sequences lie one behind the other."""
        net = self.network
        qkv = linear(x, self.weights["qkv_proj"], self.bias)
        return torch.cat([self._one(each) for each in qkv.view(len(x), -1, net.dim).split(list(lengths))])

    def _one(self, qkv: torch.Tensor) -> torch.Tensor:
        net = self.network
        base = net.config["rope_parameters"]["rope_theta"]
        steps = base ** (-torch.arange(0, net.dim, 2) / net.dim)
        angles = torch.arange(len(qkv))[:, None].double() * steps.double()
        cos, sin = (torch.cat([part, part], -1).float()[:, None] for part in (angles.cos(), angles.sin()))
        first, second = qkv.chunk(2, -1)
        turned = qkv * cos + torch.cat([-second, first], -1) * sin
        q, k, v = turned[:, : net.heads], turned[:, net.heads : -net.kv], qkv[:, -net.kv :]
        rows = (each.transpose(0, 1)[None] for each in (q, k, v))
        found = scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
        return found[0].transpose(0, 1).reshape(len(qkv), -1)

    def inputs(self, x: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """(name, inputs without their norm's weights, what the product is added to) of each matrix in turn;
        the last is ("", what comes out, None). Weights may change in between."""
        net = self.network
        normed = net.normed(x)
        yield "qkv_proj", normed, None
        attended = self.attended(normed * self.before, lengths)
        yield "o_proj", attended, x
        x = x + linear(attended, self.weights["o_proj"])
        normed = net.normed(x)
        yield "gate_up_proj", normed, None
        gate, up = linear(normed * self.behind, self.weights["gate_up_proj"]).chunk(2, -1)
        product = silu(gate) * up
        yield "down_proj", product, x
        yield "", x + linear(product, self.weights["down_proj"]), None

    def norm(self, name: str) -> torch.Tensor | None:
        """Weights of the norm that a matrix' inputs come from."""
        return {"qkv_proj": self.before, "gate_up_proj": self.behind}.get(name)

    def computed(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Hidden states behind the layer."""
        *_, last = self.inputs(x, lengths)
        return last[1]


@dataclass(slots=True)
class Tokens:
    """Sequences of ids, and which of all their places are judged."""

    sequences: list[list[int]]
    judged: list[int]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(each) for each in self.sequences]


def answers(work: Path) -> None:
    """Write the prompts and the model's greedy answers in bf16, the held-out ones first."""
    from training.pocket import format_error
    from training.quantized import FORMS, TOPICS
    from training.quantized import HELD_OUT as ASKED

    from snugvl.checkpoint.families import read_config
    from snugvl.core.messages import user
    from snugvl.inputs.prompt import Processor
    from snugvl.models.loader import load_model

    folder = CODER.shuffled()
    processor = Processor.from_folder(folder, read_config(folder))
    model = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    asked = [*ASKED, *(FORMS[number % len(FORMS)].format(topic) for number, topic in enumerate(TOPICS))]
    prompts = [processor.prepare([user(each)]) for each in asked]
    made = format_error.answered(model, prompts, processor.tokenizer.eos_ids)
    pairs = [[list(each.prompt_ids), list(one)] for each, one in zip(prompts, made, strict=True)]
    work.mkdir(parents=True, exist_ok=True)
    (work / "answers.json").write_text(json.dumps(pairs))


def material(work: Path, every: int) -> tuple[Tokens, Tokens]:
    """(calibration, held out)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CODER.shuffled() / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    asked = json.loads((work / "answers.json").read_text())
    held, judged, start = [], [], 0
    for prompt, answer in asked[:HELD_OUT]:
        held.append([*prompt, *answer[:-1]])
        judged += range(start + len(prompt) - 1, start + len(held[-1]))
        start += len(held[-1])
    held.append(ids(pydoc_data.topics.topics["objects"])[:TEXT_TOKENS])
    judged += range(start, start + TEXT_TOKENS)
    given = [[*prompt, *answer] for prompt, answer in asked[HELD_OUT:]]
    given += [ids(pydoc_data.topics.topics[each][:CHARACTERS]) for each in CHAPTERS]
    return Tokens([each[:PIECE] for each in given[::every]], []), Tokens(held, judged)


def collect(work: Path, layers: Sequence[int], every: int) -> None:
    """Keep hidden states before `layers`, mean squares of inputs of all matrices, and what is exact."""
    net, (given, held) = Network(), material(work, every)
    squares: dict[str, torch.Tensor] = {}
    states = [net.embedded(list(chain.from_iterable(each.sequences))) for each in (given, held)]
    print(f"{len(states[0])} tokens for calibration, {len(states[1])} held out", flush=True)
    for index in range(net.depth):
        if index in layers:
            torch.save(states, work / f"before{index}.pt")
        layer = net.layer(index)
        torch.set_float32_matmul_precision("medium")
        for name, x, _ in layer.inputs(states[0], given.lengths):
            if name:
                norm = layer.norm(name)
                squares[f"{index}.{name}"] = (x if norm is None else x * norm).square().mean(0)
            else:
                states[0] = x
        torch.set_float32_matmul_precision("highest")
        states[1] = layer.computed(states[1], held.lengths)
        print(index, end=" ", flush=True)
    torch.save(squares, work / "squares.pt")
    torch.save(net.log_probs(states[1][held.judged]), work / "exact.pt")


def hadamard(size: int) -> torch.Tensor:
    """An orthogonal matrix `[size, size]` of values ±1 / √size; `size` = 2ⁿ or 12 · 2ⁿ, signs at random."""
    made = torch.ones(1, 1)
    if size % 12 == 0:  # Paley's first: 11 is a prime of the form 4n + 3
        residues = {i * i % 11 for i in range(1, 11)}
        made = torch.ones(12, 12)
        made[1:, 0] = -1
        for i in range(11):
            for j in range(11):
                made[1 + i, 1 + j] = 1 if i == j or (j - i) % 11 in residues else -1
    while len(made) < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    signs = torch.randint(2, (size,), generator=torch.Generator().manual_seed(size)) * 2.0 - 1
    return made * signs / math.sqrt(size)


@dataclass(frozen=True, slots=True)
class Turned:
    """Rotations of a matrix' inputs and outputs; None: none. Each column is multiplied with its
    input's root mean square to the `power`, and its own to the −`weights`, the input divided by that."""

    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    power: float = 0.0
    weights: float = 0.0
    folded: bool = False


def turns(net: Network, kind: str, power: float, weights: float) -> dict[str, Turned]:
    """By matrix: none, those that fold into weights ("rotated"), and with that of `down_proj`'s inputs, which
    has to be computed at each token ("online")."""
    if kind == "base":
        return {name: Turned(power=power, weights=weights) for name in NAMES}
    if kind == "folded":  # as `snugvl quantize` has it
        return {name: Turned(folded=name != "o_proj") for name in NAMES}
    if kind not in ("rotated", "online"):
        raise SystemExit(f"there is no way {kind!r}")
    stream = hadamard(net.hidden)
    head = hadamard(net.dim)
    values = torch.block_diag(*[head] * net.heads)
    width = net.config["intermediate_size"]
    down = torch.block_diag(*[hadamard(256)] * (width // 256)) if kind == "online" else None
    return {
        "qkv_proj": Turned(stream, None),
        "o_proj": Turned(values, stream),
        "gate_up_proj": Turned(stream, None),
        "down_proj": Turned(down, stream),
    }


Rounder = Callable[[torch.Tensor, rounding.Moments], torch.Tensor]


def plainly(bits: int, group: int) -> Rounder:
    """As weights are rounded while loading, with the squares of the calibration's inputs."""

    def rounded(values: torch.Tensor, moments: rounding.Moments) -> torch.Tensor:
        return to_few_bits(values, integer_of(bits), group, moments.squares).wide(torch.float32)

    return rounded


def compensated(bits: int, group: int) -> Rounder:
    """As `snugvl quantize --with` does."""

    def rounded(values: torch.Tensor, moments: rounding.Moments) -> torch.Tensor:
        return rounding.rounded(values, Grid(bits, group), moments, compensate=True).values()

    return rounded


def in_blocks(name: str) -> Rounder:
    """As `snugvl quantize --format gguf --with` does, in blocks of that type."""
    kind = ggml_type(name)
    assert kind is not None, name
    layout = LAYOUTS[kind]

    def rounded(values: torch.Tensor, moments: rounding.Moments) -> torch.Tensor:
        grid = Grid(layout.low + layout.high, layout.group, kind)
        return rounding.rounded(values, grid, moments, compensate=True).values()

    return rounded


def round_layer(
    layer: Layer,
    given: torch.Tensor,
    lengths: Sequence[int],
    turned: dict[str, Turned],
    how: Mapping[str, Rounder],
    share: float,
) -> None:
    """Round the matrices of a layer one behind the other, in place; `given`: its exact inputs."""
    exact = Layer(layer.network, dict(layer.weights), layer.bias, layer.before, layer.behind)
    pairs = zip(layer.inputs(given, lengths), exact.inputs(given, lengths), strict=True)
    for (name, x, stream), (_, was, stream_was) in pairs:
        if not name:
            return
        turn, norm, weight = turned[name], layer.norm(name), exact.weights[name]
        if turn.inputs is not None and norm is not None:
            weight = weight * norm
        elif norm is not None:
            x, was = x * norm, was * norm
        lacking = linear(was - x, weight)
        if stream is not None:
            lacking += stream_was - stream
            each = stream.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6).reciprocal()
            x, lacking = x * each, lacking * each
        if turn.inputs is not None:
            x, weight = x @ turn.inputs, weight @ turn.inputs
        if turn.outputs is not None:
            lacking, weight = lacking @ turn.outputs, turn.outputs.T @ weight
        scale = _scale(
            weight, x.square().mean(0), turn, layer.network.heads // layer.network.kv * (name == "o_proj")
        )
        x, weight = x / scale, weight * scale
        moments = rounding.Moments(weight.shape[1], weight.device, rows=len(weight))
        torch.set_float32_matmul_precision("medium")  # inputs rounded to bf16
        moments.sums, moments.count = x.T @ x, len(x)
        torch.set_float32_matmul_precision("highest")
        moments.lost = lacking.T @ x * (share / rounding.SHARE)
        made = how[name](weight, moments) / scale
        if turn.outputs is not None:
            made = turn.outputs @ made
        if turn.inputs is not None:
            made = made @ turn.inputs.T
        layer.weights[name] = made if norm is None or turn.inputs is None else made / norm


HEAD = 128  # values
MOST_ROWS = {"gate_up_proj": 2048, "down_proj": 256}


def matrices(judge: "Judge", index: int) -> dict[str, dict[str, Any]]:
    """Of each matrix of a layer: some rows of it, and mean products of exact inputs for calibration and held
    out, each token over the root mean square of the stream that the product is added to."""
    kept = judge.work / f"products{index}.pt"
    if not kept.exists():
        layer, made = judge.net.layer(index), dict[str, dict[str, Any]]()
        torch.set_float32_matmul_precision("medium")  # inputs rounded to bf16
        of = zip(("given", "held"), judge.states(index), (judge.given, judge.held), strict=True)
        for which, states, tokens in of:
            for name, x, stream in layer.inputs(states, tokens.lengths):
                if not name:
                    break
                if stream is not None:
                    x = x / stream.square().mean(-1, keepdim=True).sqrt()
                norm, rows = layer.norm(name), MOST_ROWS.get(name)
                weight = layer.weights[name][:rows] * (1 if norm is None else norm)
                norm = torch.ones(x.shape[1]) if norm is None else norm
                made.setdefault(name, {"weight": weight, "norm": norm})[which] = x.T @ x / len(x)
        torch.set_float32_matmul_precision("highest")
        torch.save(made, kept)
    found: dict[str, dict[str, Any]] = torch.load(kept, mmap=True)
    return found


def alone(judge: "Judge", index: int, bits: int, group: int, way: str, names: Sequence[str]) -> None:
    """Print what single matrices lose on exact held-out inputs, relative to their outputs."""
    how, turned, settings = meant(judge.net, bits, group, way)
    row: dict[str, Any] = {"way": way, "layer": index, "bits": bits, "group": group, "lost": {}}
    print(f"{way + f', {bits} bits, {group}':<34}layer {index:<4}", end="")
    for name in names:
        found, began = matrices(judge, index)[name], time.process_time()
        weight, given, held = (found[each].clone() for each in ("weight", "given", "held"))
        whole = ((weight @ held) * weight).sum()
        exact = weight
        turn = turned[name]
        norm = found["norm"] if turn.inputs is None else torch.ones(len(given))
        given, weight = given * norm * norm[:, None], weight / norm
        scale = _scale(weight, given.diagonal(), turn, judge.net.heads // judge.net.kv * (name == "o_proj"))
        given, weight = given / scale / scale[:, None], weight * scale
        if turn.inputs is not None:
            given, weight = turn.inputs.T @ given @ turn.inputs, weight @ turn.inputs
        moments = rounding.Moments(len(given), given.device, rows=None)
        moments.sums, moments.count = given, 1
        with mock.patch.multiple(rounding, **settings):
            made = how[name](weight, moments)
        if turn.inputs is not None:
            made = made @ turn.inputs.T
        off = made / scale * norm - exact
        row["lost"][name] = float(((off @ held) * off).sum() / whole)
        print(
            f"{name[:-5]} {row['lost'][name]:.3e} ({time.process_time() - began:.0f} s)  ", end="", flush=True
        )
    print()
    with (judge.work / "alone.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _scale(weight: torch.Tensor, squares: torch.Tensor, turn: Turned, shared: int) -> torch.Tensor:
    """Factors of columns `[columns]` for mean squares of inputs; `shared` heads have the same values, and so
    the same factors."""
    if turn.folded:
        return rounding.factors_of(weight)
    if shared:
        heads = squares.view(-1, shared, HEAD)
        squares = heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)
    own = weight.square().mean(0)
    own = (own / own.mean() + 1e-4).pow(-turn.weights / 2)
    return own * (squares / squares.mean() + 1e-4).pow(turn.power / 2)


def lost(layer: Layer, exact: Layer, held: torch.Tensor, lengths: Sequence[int]) -> dict[str, float]:
    """What the outputs of each rounded matrix lose on exact held-out inputs, relative to them."""
    found = {}
    for name, x, stream in exact.inputs(held, lengths):
        if not name:
            break
        norm = exact.norm(name)
        x = x if norm is None else x * norm
        if stream is not None:
            x = x / stream.square().mean(-1, keepdim=True).sqrt()
        off = linear(x, layer.weights[name] - exact.weights[name]).square().sum()
        found[name] = float(off / linear(x, exact.weights[name]).square().sum())
    return found


class Judge:
    """The exact network's log-probabilities of held-out tokens, and what others cost."""

    def __init__(self, work: Path, every: int) -> None:
        self.work, self.net = work, Network()
        self.given, self.held = material(work, every)
        self.exact = torch.load(work / "exact.pt", mmap=True)
        self.answers = len(self.held.judged) - TEXT_TOKENS

    def states(self, index: int) -> list[torch.Tensor]:
        """(calibration's, held-out) hidden states before a layer."""
        found: list[torch.Tensor] = torch.load(self.work / f"before{index}.pt")
        return found

    def judged(self, first: int, layer_of: Callable[[int], Layer]) -> tuple[float, float, float]:
        """KL of answers and of the text, and the share of likeliest tokens of answers that stay.

        Args:
            first: the first layer that isn't exact.
            layer_of: gives that and all behind it.
        """
        x = self.states(first)[1]
        for index in range(first, self.net.depth):
            x = layer_of(index).computed(x, self.held.lengths)
        x = x[self.held.judged]
        kl, same = [], []
        for start in range(0, len(x), 256):
            ours, exact = self.net.log_probs(x[start : start + 256]), self.exact[start : start + 256]
            kl.append((exact.exp() * (exact - ours)).sum(-1))
            same.append(ours.argmax(-1) == exact.argmax(-1))
        nats, alike = torch.cat(kl), torch.cat(same).float()
        n = self.answers
        return float(nats[:n].mean()), float(nats[n:].mean()), float(alike[:n].mean())

    def show(self, name: str, index: int, changed: Layer, began: float, **more: Any) -> None:
        """Judge, print a line, and keep it."""
        losses = lost(changed, self.net.layer(index), self.states(index)[1], self.held.lengths)
        answers, text, same = self.judged(index, lambda at: changed if at == index else self.net.layer(at))
        print(f"{name:<34}layer {index:<4}{answers:>10.6f}{text:>10.6f}{same:>8.2%}  ", end="")
        print(*(f"{each}: {value:.2e}" for each, value in losses.items()), end="")
        print(f"  {time.process_time() - began:.0f} s", flush=True)
        row = {"way": name, "layer": index, "kl": answers, "text": text, "same": same, "lost": losses}
        with (self.work / "trials.jsonl").open("a") as file:
            file.write(json.dumps(row | more) + "\n")


def meant(
    net: Network, bits: int, group: int, way: str
) -> tuple[dict[str, Rounder], dict[str, Turned], dict[str, Any]]:
    """(the rounding of each matrix, rotations, changed constants of `rounding`) of KIND[,SETTING=VALUE…];
    KIND: load, base, folded, rotated, online, load-folded, load-rotated, load-online, gptq-TYPE,
    ggml-TYPE, blocks-TYPE (BITS and GROUP count not), either with +TYPE for the MLP."""
    kind, *given = way.split(",")
    settings = {"TRUST": rounding.TRUST}
    settings |= {key: float(value) for key, value in (each.split("=") for each in given)}
    how = (plainly if kind.startswith("load") else compensated)(bits, group)
    if kind.startswith("gptq-"):
        how, kind = compensated_in(kind.removeprefix("gptq-")), "base"
    hows = dict.fromkeys(NAMES, how)
    for start, rounder, turn in (("blocks-", in_blocks, "folded"), ("ggml-", by_ggml, "base")):
        if kind.startswith(start):
            first, _, second = kind.removeprefix(start).partition("+")
            of = {"qkv_proj": first, "o_proj": first}
            hows, kind = {name: rounder(of.get(name, second or first)) for name in NAMES}, turn
    kind = kind.removeprefix("load").strip("-") or "base"
    turned = turns(net, kind, settings.pop("POWER", 0.0), settings.pop("WEIGHTS", 0.0))
    return hows, turned, {key: type(getattr(rounding, key))(value) for key, value in settings.items()}


def trial(judge: Judge, index: int, bits: int, group: int, way: str) -> None:
    """One way on one layer, judged by what comes out of the network."""
    began, layer = time.process_time(), judge.net.layer(index)
    how, turned, settings = meant(judge.net, bits, group, way)
    share = settings.pop("SHARE", rounding.SHARE)
    with mock.patch.multiple(rounding, **settings):
        round_layer(layer, judge.states(index)[0], judge.given.lengths, turned, how, share)
    judge.show(f"{way}, {bits} bits, {group}", index, layer, began, bits=bits + 32 / group)


def rounded_layers(judge: Judge, layers: Sequence[int], bits: int, group: int, way: str) -> dict[int, Path]:
    """Files of weights of these layers, rounded so behind exact layers; what isn't there is made."""
    how, turned, settings = meant(judge.net, bits, group, way)
    share = settings.pop("SHARE", rounding.SHARE)
    rounded = {index: judge.work / f"{way}-{index}.pt" for index in layers}
    for index, kept in rounded.items():
        if not kept.exists():
            layer, began = judge.net.layer(index), time.process_time()
            with mock.patch.multiple(rounding, **settings):
                round_layer(layer, judge.states(index)[0], judge.given.lengths, turned, how, share)
            torch.save({name: each.half() for name, each in layer.weights.items()}, kept)
            print(f"{way} layer {index}: {time.process_time() - began:.0f} s", flush=True)
    return rounded


def several(judge: Judge, layers: Sequence[int], bits: int, group: int, way: str) -> None:
    """One way on all these layers at once."""
    rounded = rounded_layers(judge, layers, bits, group, way)

    def layer_of(index: int) -> Layer:
        layer = judge.net.layer(index)
        if index in rounded:
            layer.weights = {name: each.float() for name, each in torch.load(rounded[index]).items()}
        return layer

    answers, text, same = judge.judged(min(layers), layer_of)
    print(f"{way:<24}{len(layers):>3} layers{answers:>10.6f}{text:>10.6f}{same:>8.2%}", flush=True)
    row = {"way": way, "layers": [*layers], "kl": answers, "text": text, "same": same}
    with (judge.work / "trials.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def peer(judge: Judge, index: int, wanted: str) -> None:
    """ggml's rounding with an importance matrix, to one type or to those of the released file."""
    import gguf

    squares = torch.load(judge.work / "squares.pt")
    types = {each.name: each.tensor_type for each in gguf.GGUFReader(CODER.file()).tensors}
    layer, began, held = judge.net.layer(index), time.process_time(), 0
    for name, parts in STORED.items():
        importance = squares[f"{index}.{name}"].contiguous()
        made = []
        for part in parts:
            weight = judge.net.tensor(f"model.layers.{index}.{part}.weight").contiguous()
            kind = types[f"blk.{index}.{GGUF_NAMES[part]}.weight"]
            if wanted != RELEASED:
                kind = gguf.GGMLQuantizationType[wanted]
            made.append(_by_ggml(weight, kind, importance))
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            held += weight.numel() // block * nbytes
        layer.weights[name] = torch.cat(made)
    bits = 8 * held / sum(each.numel() for each in layer.weights.values())
    judge.show(f"ggml's {wanted}, imatrix, {bits:.2f} bits", index, layer, began, bits=bits)


def by_ggml(kind: str) -> Rounder:
    """ggml's rounding to one of its types, with the mean squares of inputs as importance."""
    import gguf

    def rounded(values: torch.Tensor, moments: rounding.Moments) -> torch.Tensor:
        squares = moments.squares.float().contiguous()
        return _by_ggml(values.contiguous(), gguf.GGMLQuantizationType[kind], squares)

    return rounded


def compensated_in(kind: str) -> Rounder:
    """Scales and minimums of ggml's Q4_K or Q5_K, and codes as `snugvl quantize --with` finds them."""
    import gguf

    bits = {"Q4_K": 4, "Q5_K": 5}[kind]

    def rounded(values: torch.Tensor, moments: rounding.Moments) -> torch.Tensor:
        made = _by_ggml(
            values.contiguous(), gguf.GGMLQuantizationType[kind], moments.squares.contiguous(), raw=True
        )
        step, least = _lines(made, len(values), {4: 144, 5: 176}[bits])
        lines = Lines(step, least / step)
        damped, grid = rounding._damped(moments), Grid(bits, 32)
        codes = rounding._compensated(values, grid, lines, *rounding._factor(damped))
        step, zero = rounding._wide(lines, grid)
        return (codes - zero) * step

    return rounded


def _lines(raw: torch.Tensor, rows: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps and minimums `[rows, columns / 32]` of blocks of Q4_K and Q5_K."""
    import gguf

    blocks = raw.numpy().reshape(-1, nbytes)
    scales, least = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    halves = torch.from_numpy(blocks[:, :4].copy()).view(torch.float16).float()
    step = halves[:, :1] * torch.from_numpy(scales.astype("float32")).reshape(len(blocks), -1)
    low = halves[:, 1:] * torch.from_numpy(least.astype("float32")).reshape(len(blocks), -1)
    return step.clamp(min=1e-8).view(rows, -1), low.view(rows, -1)


def _by_ggml(weight: torch.Tensor, kind: Any, importance: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
    import gguf
    import numpy as np
    import xllamacpp

    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))

    rows, columns = weight.shape
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    made = np.zeros((rows, columns // block * nbytes), np.uint8)
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer = ctypes.c_void_p
    quantize.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]
    quantize(int(kind), weight.data_ptr(), made.ctypes.data, 0, rows, columns, importance.data_ptr())
    return torch.from_numpy(made if raw else gguf.quants.dequantize(made, kind))


@torch.inference_mode()
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=("answers", "collect", "alone", "layer", "several", "peer"))
    parser.add_argument("--layers", type=int, nargs="+", default=(2, 14, 25))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--types", nargs="+", default=(RELEASED,), help="ggml's, of peer")
    parser.add_argument("--names", nargs="+", default=NAMES, help="matrices of alone")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=("load", "base"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.what == "answers":
        answers(given.work)
        return
    if given.what == "collect":
        collect(given.work, given.layers, given.every)
        return
    judge = Judge(given.work, given.every)
    for way in given.ways if given.what == "several" else ():
        several(judge, given.layers, given.bits, given.group, way)
    for index in given.layers:
        for wanted in given.types if given.what == "peer" else ():
            peer(judge, index, wanted)
        with (
            mock.patch.dict(FORMATS, int3=Format((2, 1), zero=True)),
            mock.patch.object(formats, "INTEGERS", (*formats.INTEGERS, "int3")),
        ):
            for way in given.ways if given.what == "layer" else ():
                trial(judge, index, given.bits, given.group, way)
            for way in given.ways if given.what == "alone" else ():
                alone(judge, index, given.bits, given.group, way, given.names)


if __name__ == "__main__":
    main()
