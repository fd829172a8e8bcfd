"""Tiny random mixtures of experts, written in the forms that published files have."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests import checkpoints, hybrid
from tests.checkpoints import FP8, LINEARS, quantised

COUNT, USED = 6, 2
Form = Literal["whole", "turned", "apart"]  # of the experts in a file
IMAGES = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
}  # fmt: skip
FAMILIES = {
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}


@dataclass(frozen=True)
class Options:
    """How the checkpoint differs from the plain one."""

    family: str = "qwen3_5_moe"
    form: Form = "whole"
    width: int = 32
    hidden: int = 64
    fp8: bool = False
    predictor: bool = False
    dense: tuple[int, ...] = ()  # layers of Qwen3-VL's that are no mixture
    mtp_form: Form | None = None
    value_dim: int = 8
    vocab: int = 0  # of Qwen3.5's; 0: as few tokens as a network of no tokenizer has
    placeholders: tuple[int, ...] = ()


def config(options: Options) -> dict[str, Any]:
    """`config.json` in the form that the Hub's checkpoints have."""
    vl = options.family == "qwen3_vl_moe"
    values = (
        checkpoints.config(checkpoints.Options(tied=False))
        if vl
        else hybrid.config(
            hybrid.Options(
                tied=False,
                predictor=options.predictor,
                hidden=options.hidden,
                value_dim=options.value_dim,
                **({"vocab": options.vocab, "placeholders": options.placeholders} if options.vocab else {}),
            )
        )
    )
    text = values["text_config"]
    values["architectures"] = [FAMILIES[options.family][1].__name__]
    values["model_type"] = options.family
    text["model_type"] = f"{options.family}_text"
    text |= {"num_experts": COUNT, "num_experts_per_tok": USED, "moe_intermediate_size": options.width}
    if vl:
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": list(options.dense), "norm_topk_prob": True}
    else:
        del text["intermediate_size"]
        text["shared_expert_intermediate_size"] = options.width
        values["vision_config"]["model_type"] = "qwen3_5_moe_vision"
    return values


def transformers_of(folder: Path, options: Options, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' network with the weights of a folder, whatever form they are in: the oracle."""
    made, network = FAMILIES[options.family]
    model = network(made(**config(options))).eval()
    state = torch.load(folder / "whole.pt")
    missing = model.load_state_dict(state, strict=False)
    assert not missing.missing_keys
    return model.to(dtype)


def write(folder: Path, options: Options = Options()) -> Path:
    """Write a checkpoint and return its folder; beside it the plain weights for `transformers_of`."""
    folder.mkdir(parents=True, exist_ok=True)
    made, network = FAMILIES[options.family]
    torch.manual_seed(0)
    model = network(made(**config(options)))
    random = checkpoints._random if options.family == "qwen3_vl_moe" else hybrid._random
    state = {name: _random(name, tensor, random) for name, tensor in model.state_dict().items()}
    values = config(options)
    if options.predictor:
        state |= {
            name: _random(name, tensor, random)
            for name, tensor in hybrid.predictor_of(state, options.hidden).items()
        }
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        form = options.mtp_form if name.startswith("mtp.") and options.mtp_form else options.form
        stored |= in_form(name, tensor, form) if ".experts." in name else {name: tensor}
    if options.fp8:
        values["quantization_config"] = dict(FP8)
        stored = quantised(stored, (*LINEARS, "in_proj_qkv", "in_proj_z", "out_proj"))
        plain = dequantised(stored)
        state = {name: plain.get(name, tensor) for name, tensor in whole(plain, state).items()}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    torch.save(state, folder / "whole.pt")
    return folder


def in_form(name: str, tensor: torch.Tensor, form: Form) -> dict[str, torch.Tensor]:
    """A tensor of all experts as a file has it."""
    if form == "whole":
        return {name: tensor}
    if form == "turned":
        return {name: tensor.transpose(1, 2).contiguous()}
    stem, part = name.rsplit(".", 1)
    halves = tensor.chunk(2, dim=1) if part == "gate_up_proj" else (tensor,)
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{stem}.{expert}.{each}.weight": half[expert]
        for each, half in zip(names, halves, strict=True)
        for expert in range(len(tensor))
    }


def whole(apart: dict[str, torch.Tensor], like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of single experts back in one."""
    made = dict(like)
    for name in like:
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        rows = [
            torch.cat([apart[f"{stem}.{expert}.{each}.weight"] for each in parts]) for expert in range(COUNT)
        ]
        made[name] = torch.stack(rows)
    return made


def dequantised(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FP8 in float32, by the plain formula."""
    made = {}
    for name, tensor in state.items():
        scale = state.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            blocks = tensor.float().reshape(rows // 32, 32, columns // 32, 32)
            tensor = (blocks * scale[:, None, :, None]).reshape(rows, columns)
        if not name.endswith("_scale_inv"):
            made[name] = tensor
    return made


def _random(name: str, tensor: torch.Tensor, other: Any) -> torch.Tensor:
    if name.endswith(".gate.weight"):
        return torch.randn(tensor.shape) * 0.3  # routers that tell tokens apart
    made: torch.Tensor = other(name, tensor)
    return made
