"""EXL3 as a peer: what is around exllamav3's functions, of which stand-ins are given here."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from training.exl3 import FIRST, ROW, Peer, own_rows, round_network
from transformers import AutoModelForCausalLM, Qwen2Config

from snugvl.models.loader import load_model

CPU, DEPTH, BITS = torch.device("cpu"), 4, {"qkv_proj": 5, "o_proj": 5, "gate_up_proj": 3, "down_proj": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose sides don't divide by 128."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320, hidden_size=192, intermediate_size=320, num_hidden_layers=DEPTH,
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    made = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(made)
    return made


class Halving(list[dict[str, Any]]):
    """Stands for exllamav3: rounds every weight to its half, and keeps what it was asked."""

    def quantise(
        self, weight: torch.Tensor, given: dict[str, Any], how: dict[str, Any], *, return_weight_q: bool
    ) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
        columns, rows = weight.shape
        assert return_weight_q
        assert weight.is_contiguous()
        assert not columns % 128
        assert not rows % 128
        self.append({"weight": weight, "H": given["H"] / given["count"], "given": given} | how)
        return weight / 2, 0.0, {"trellis": torch.empty(weight.numel() * how["K"] // 8, dtype=torch.uint8)}

    def allocate(self, model: Any, *_: Any) -> tuple[dict[str, int], float]:
        planned: Sequence[SimpleNamespace] = model.modules
        return {each.key: BITS[each.key.rpartition(".")[2]] for each in planned}, 0.0


@torch.inference_mode()
def halved(folder: Path, layers: int | None = None) -> tuple[Any, Any, Halving, float]:
    """(the exact network, the rounded one, what was asked, bits of a weight)."""
    exact, model = (load_model(folder, dtype=torch.float32, device=CPU) for _ in range(2))
    theirs, pieces = Halving(), [tuple(range(3, 60)), tuple(range(100, 300))]
    peer = Peer(theirs.quantise, theirs.allocate, list)
    held = round_network(peer, model, folder, pieces, 4.0, layers)
    return exact, model, theirs, held


def linears(model: Any, layer: int) -> dict[str, torch.Tensor]:
    """The matrices of a layer."""
    inner = model.decoder.layers[layer]
    return {name: inner.get_submodule(name).weight for name in FIRST}


def test_every_part_of_every_matrix_is_rounded_in_its_place(folder: Path) -> None:
    exact, model, theirs, held = halved(folder)
    for layer in range(DEPTH):
        before, after = linears(exact, layer), linears(model, layer)
        assert all(torch.equal(after[name], before[name] / 2) for name in before)
    assert len(theirs) == 7 * DEPTH
    stored = sum(each["weight"].numel() * each["K"] for each in theirs)
    real = sum(each.numel() for layer in range(DEPTH) for each in linears(exact, layer).values())
    assert held == stored / real


def test_parts_with_the_same_inputs_share_what_is_made_of_them(folder: Path) -> None:
    _, _, theirs, _ = halved(folder)
    kinds = [id(each["given"]) for each in theirs[:7]]
    assert len(set(kinds)) == 4
    assert sorted(each["K"] for each in theirs[:7]) == [3, 3, 4, 5, 5, 5, 5]
    assert {each["seed"] for each in theirs} == set(range(1, DEPTH + 1))


@torch.inference_mode()
def test_inputs_are_those_behind_rounded_layers_and_within_the_exact_one(folder: Path) -> None:
    """transformers computes the same network, its first layer halved, up to the second layer's down_proj."""
    _, _, theirs, _ = halved(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.startswith("model.layers.0") and name.endswith("proj.weight"):
            parameter.div_(2)
    seen: list[torch.Tensor] = []
    hooked = model.model.layers[1].mlp.down_proj
    hooked.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    for piece in (range(3, 60), range(100, 300)):
        model(torch.tensor([[*piece]]))
    inputs = torch.cat(seen)
    wanted = inputs.T @ inputs / len(inputs)
    (found,) = (each["H"] for each in theirs if each["seed"] == 2 and each["K"] == BITS["down_proj"])
    assert found.shape == (384, 384)
    assert not found[320:].any()
    assert not found[:, 320:].any()
    assert (found[:320, :320] - wanted).norm() < 1e-4 * wanted.norm()


def test_some_layers_stay_exact(folder: Path) -> None:
    exact, model, _, _ = halved(folder, layers=2)
    same = [
        torch.equal(linears(exact, layer)["mlp.down_proj"], linears(model, layer)["mlp.down_proj"])
        for layer in range(DEPTH)
    ]
    assert same == [False, True, False, True]


def test_embedding_and_head_are_q8_0(folder: Path) -> None:
    exact, model, _, _ = halved(folder, layers=1)
    kind = gguf.GGMLQuantizationType.Q8_0
    for before, after in (
        (exact.decoder.embed_tokens, model.decoder.embed_tokens),
        (exact.lm_head, model.lm_head),
    ):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(before.weight.detach().numpy(), kind), kind)
        off = (after.weight - torch.from_numpy(wanted)).abs() > 1e-6
        assert off.float().mean() < 1e-3  # weights in the middle between two codes


def test_its_own_texts_are_read_with_the_models_tokens() -> None:
    def rows(asked: dict[str, int], tokenizer: Any) -> list[torch.Tensor]:
        assert asked == {"cal_rows": 2, "cal_cols": ROW}
        return [tokenizer.encode("ab", add_bos=True, add_eos=True), tokenizer.encode("c")]

    theirs = Halving()
    found = own_rows(Peer(theirs.quantise, theirs.allocate, rows), lambda text: [*text.encode()], 2)
    assert found == [(97, 98), (99,)]
