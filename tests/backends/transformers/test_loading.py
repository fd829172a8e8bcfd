"""From a name to a running model: what is refused and why, and that a placement is followed."""

import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

from snugvl.backends.process.wire import EngineChoice
from snugvl.backends.transformers import network, requirements
from snugvl.backends.transformers.loading import load_hosted
from snugvl.backends.transformers.network import by_bits_bytes, checked, skeleton_of, without_tower
from snugvl.backends.transformers.opening import open_checkpoint
from snugvl.core.messages import Picture, Request, user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import (
    CheckpointError,
    CheckpointNotFound,
    DoesNotFit,
    EngineError,
    RequestError,
    UnsupportedModel,
)
from snugvl.hardware import host
from tests import checkpoints
from tests.backends.transformers import families
from tests.backends.transformers.conftest import CPU, Opened, load_engine, run
from tests.inputs.conftest import whole_options, write_checkpoint

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
Find = Callable[[str], Any]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return families.llama(tmp_path / "llama")


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found: Find = requirements.find_spec
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name in modules else found(name))


@cache
def plain_answer(folder: Path) -> str:
    """A greedy answer about a picture, in float32 with everything where it usually is."""
    return answer(folder, dtype="float32")


def answer(folder: Path, **options: Any) -> str:
    """A greedy answer about a picture."""
    loaded = load_engine(folder, **{"device": "cpu", "context": 512, **options})
    stream = loaded.backend.submit(Request((user(Image.new("RGB", (64, 64), "red"), "What?"),), SAMPLING))
    text = "".join(delta.text for delta in stream)
    loaded.backend.close()
    return text


def test_without_transformers_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "transformers")
    with pytest.raises(EngineError, match=r"needs transformers; .*pip install 'snugvl\[transformers\]'"):
        load_engine(folder, device="cpu")


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("torchao", "torchao"),
        ("compressed-tensors", "compressed-tensors"),
        ("awq", "gptqmodel"),
        ("gptq", "optimum gptqmodel"),
    ],
)
def test_what_a_quantised_checkpoint_needs_is_named(
    method: str, package: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "bitsandbytes", "torchao", "compressed_tensors", "optimum", "gptqmodel")
    change(llama, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedModel, match=f"quantised by {method}.*pip install {package}$"):
        load_engine(llama, device="cpu")


def test_a_quantisation_that_nobody_knows_is_refused(llama: Path) -> None:
    change(llama, quantization_config={"quant_method": "magic"})
    with pytest.raises(UnsupportedModel, match="quantised by 'magic'"):
        load_engine(llama, device="cpu")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantising_needs_bitsandbytes(weights: Any, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "bitsandbytes")
    with pytest.raises(RequestError, match="pip install bitsandbytes"):
        load_engine(llama, device="cpu", weights=weights)


def test_weights_of_a_quantised_checkpoint_stay_as_they_are(llama: Path) -> None:
    change(llama, quantization_config={"quant_method": "fp8"})
    with pytest.raises(RequestError, match="quantised already"):
        load_engine(llama, device="cpu", weights="int8")


def test_fp8_is_widened_and_answers_as_its_values_say(tmp_path: Path) -> None:
    plain, fp8 = tmp_path / "plain", tmp_path / "fp8"
    for made in (plain, fp8):
        made.mkdir()
        write_checkpoint(made)
    options = whole_options(plain, fp8=True)
    checkpoints.write(fp8, options)
    checkpoints.write(plain, replace(options, fp8=False))
    from safetensors.torch import save_file

    wide = {name: value for name, value in checkpoints.dequantised(fp8).items() if name != "lm_head.weight"}
    save_file({name: value.contiguous() for name, value in wide.items()}, plain / "model.safetensors")
    assert answer(fp8, dtype="float32") == answer(plain, dtype="float32")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def foreign(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkpoint that brings Python of its own."""
    (llama / "own.py").write_text(OWN_CODE)
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    change(llama, model_type="own_llama", architectures=["OwnModel"], auto_map=code)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return llama


def test_foreign_code_runs_only_by_flag(foreign: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"own\.py.*whatever you can.*--trust-remote-code"):
        load_engine(foreign, device="cpu")


def test_trusted_code_runs(foreign: Path) -> None:
    backend = load_engine(foreign, device="cpu", context=256, trust_remote_code=True).backend
    streams = [backend.submit(Request((user(text),), SAMPLING)) for text in ("Hi", "What?")]
    assert all(list(stream) for stream in streams)
    assert backend.capabilities.architecture == "OwnModel"
    backend.close()


def test_an_architecture_that_nobody_knows_is_refused(llama: Path) -> None:
    change(llama, model_type="martian")
    with pytest.raises(UnsupportedModel, match=r"'martian', which transformers .* doesn't know"):
        load_engine(llama, device="cpu")


def test_a_model_that_does_not_talk_is_refused(llama: Path) -> None:
    change(llama, model_type="clip_vision_model")
    with pytest.raises(UnsupportedModel, match="clip_vision_model"):
        load_engine(llama, device="cpu")


def test_broken_checkpoints_are_refused(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(CheckpointNotFound):
        load_engine(tmp_path / "nothing", device="cpu")
    weights = load_file(llama / "model.safetensors")
    kept = dict(weights)
    kept.pop("model.layers.1.mlp.up_proj.weight")
    save_file(kept, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights of .* are missing: model.layers.1.mlp.up_proj"):
        load_engine(llama, device="cpu")
    (llama / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError):
        load_engine(llama, device="cpu")


def test_a_checkpoint_without_a_chat_template_is_refused(llama: Path) -> None:
    (llama / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="no chat template"):
        load_engine(llama, device="cpu")


def test_what_does_not_fit_is_refused_before_it_is_loaded(llama: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"weights of .* need .* may be used"):
        load_engine(llama, device="cpu", memory=100_000)
    with pytest.raises(DoesNotFit, match=r"a context of 2,048 tokens needs .* a context of .* tokens fits"):
        load_engine(llama, device="cpu", dtype="float32", memory=400_000, context=2048)
    with pytest.raises(DoesNotFit, match=r"a context of 1,024 tokens needs"):
        load_engine(llama, device="cpu", dtype="float32", memory=400_000)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"context": 4000}, "context must be 1 to 2,048"),
        ({"weights": "fp8"}, "makes no 'fp8' weights"),
        ({"placement": (("", "cuda:7"),)}, "placed on 'cuda:7'"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], match: str, llama: Path) -> None:
    with pytest.raises(RequestError, match=match):
        load_engine(llama, **{"device": "cpu", **options})


def test_dtype_auto_takes_float32_where_it_leaves_half_of_the_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind(free: int) -> str:
        memory = host.HostMemory(2 * free, free)
        with monkeypatch.context() as patched:
            patched.setattr(host, "memory", lambda: memory)
            loaded = load_engine(llama, device="cpu")
        loaded.backend.close()
        return loaded.backend.capabilities.dtype  # type: ignore[no-any-return]

    assert kind(8 << 30) == "float32"
    monkeypatch.setattr("snugvl.backends.transformers.backend.parameters_in", lambda *_: 1 << 29)
    assert kind(3 << 30) == "bfloat16"


PLACEMENTS = {
    "host memory": (("", "cpu"),),
    "the tower on disk": (("model.visual", "disk"), ("model.language_model", "cpu"), ("lm_head", "cpu")),
    "layers on disk": (
        ("model.visual", "cpu"),
        ("model.language_model.embed_tokens", "cpu"),
        ("model.language_model.layers.0", "cpu"),
        ("model.language_model.layers.1", "disk"),
        ("model.language_model.layers.2", "disk"),
        ("model.language_model.layers.3", "cpu"),
        ("model.language_model.norm", "cpu"),
        ("model.language_model.rotary_emb", "cpu"),
        ("lm_head", "cpu"),
    ),
}


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.sample("layers on disk", "host memory")
def test_a_placement_is_followed_and_changes_no_answer(name: str, folder: Path) -> None:
    loaded = load_engine(folder, device="cpu", context=512, dtype="float32", placement=PLACEMENTS[name])
    model = loaded.backend._engine.model
    devices = {
        key.split(".")[3]: value.device.type for key, value in model.named_parameters() if "layers" in key
    }
    away = {"1", "2"} if name == "layers on disk" else set()
    tower = {value.device.type for key, value in model.named_parameters() if "visual" in key}
    assert tower == {"meta" if name == "the tower on disk" else "cpu"}
    assert {layer for layer, device in devices.items() if device == "meta"} == away
    loaded.backend.close()
    assert answer(folder, dtype="float32", placement=PLACEMENTS[name]) == plain_answer(folder)


def test_weights_on_disk_go_with_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed until the process ended; and an engine's process, which is killed or exits at once, left
    them for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def offloaded() -> list[Path]:
        return list(tmp_path.glob("snugvl-offload-*"))

    loaded = load_engine(folder, device="cpu", dtype="float32", placement=PLACEMENTS["layers on disk"])
    assert [any(each.iterdir()) for each in offloaded()] == [True]
    loaded.backend.close()
    del loaded
    gc.collect()
    assert not offloaded()
    monkeypatch.setattr(network, "plain_generation", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_engine(folder, device="cpu", dtype="float32", placement=PLACEMENTS["layers on disk"])
    gc.collect()
    assert not offloaded()


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # of versions before 5.23
def test_weights_that_wait_elsewhere_answer_the_same(qwen: Opened) -> None:
    """accelerate's hooks move a module's weights in for its forward: here from "meta" to the CPU."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    prompt = qwen.prompt(user(Image.new("RGB", (64, 64), "red"), "What?"))
    expected = qwen.expected(prompt)
    cpu_offload(qwen.model, CPU)
    try:
        assert all(parameter.device.type == "meta" for parameter in qwen.model.parameters())
        with qwen.engine() as engine:
            got = run(engine, {"one": qwen.job(prompt), "two": qwen.job(prompt)})
        assert got == {"one": expected, "two": expected}
    finally:
        remove_hook_from_submodules(qwen.model)


def test_a_placement_that_names_no_module_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"'model\.nothing', not a module"):
        load_engine(folder, device="cpu", placement=(("", "cpu"), ("model.nothing", "cpu")))
    with pytest.raises(RequestError, match=r"leaves out 'model\.language_model"):
        load_engine(folder, device="cpu", placement=(("model.visual", "cpu"),))


def test_the_plans_map_may_mix_the_gpu_host_memory_and_disk() -> None:
    skeleton = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in "abc"})
    placement = (("a", "cuda:0"), ("b", "cpu"), ("c", "disk"))
    assert checked(placement, skeleton, torch.device("cuda:0")) == dict(placement)


@pytest.mark.parametrize("name", ["qwen", "gemma3", "smolvlm"])
def test_language_only_keeps_nothing_but_the_tower_off_the_gpu(
    name: str, folder: Path, tmp_path: Path
) -> None:
    where = folder if name == "qwen" else families.SEEING[name](tmp_path / name)
    checkpoint = open_checkpoint(name, where, trusted=False)
    skeleton = skeleton_of(checkpoint, torch.float32)
    placed = without_tower(skeleton, torch.device("cuda:0"))
    towers = {module for module, device in placed.items() if device == "cpu"}
    assert towers == {
        "model.visual"
        if name == "qwen"
        else "model.vision_tower"
        if name == "gemma3"
        else "model.vision_model"
    }
    for parameter, _ in skeleton.named_parameters():
        holding = [module for module in placed if parameter == module or parameter.startswith(module + ".")]
        assert len(holding) == 1, parameter


def test_language_only_refuses_pictures_and_says_so(folder: Path) -> None:
    loaded = load_engine(folder, device="cpu", context=512, language_only=True)
    assert not loaded.backend.capabilities.images
    with pytest.raises(RequestError):
        loaded.backend.submit(Request((user(Image.new("RGB", (8, 8)), "?"),), SAMPLING))
    assert "".join(delta.text for delta in loaded.backend.submit(Request((user("Hi"),), SAMPLING)))
    loaded.backend.close()


def test_max_pixels_lowers_the_limit_of_every_picture(folder: Path) -> None:
    loaded = load_engine(folder, device="cpu", context=512, max_pixels=8192)
    assert loaded.backend.capabilities.max_pixels == 8192
    large = Image.new("RGB", (400, 300))
    prompt = loaded.backend._prompts.prepare([user(Picture(large, 1 << 20), "?")])
    assert prompt.image_tokens <= 8192 // 32**2
    loaded.backend.close()
    with pytest.raises(RequestError, match="max_pixels is 10"):
        load_engine(folder, device="cpu", max_pixels=10)


def test_the_ledger_has_what_was_planned_beside_what_is_held(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    hosted = load_hosted(
        EngineChoice(str(folder), device="cpu", context=512, dtype="float32", engine="transformers"),
        lambda detail, done: told.append((detail, done)),
    )
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert len([detail for detail, _ in told if detail.startswith("loading weights (1")]) > 10
    hosted.backend.warm_up()
    stream = hosted.backend.submit(Request((user("Hi"),), SamplingParams(max_tokens=400, ignore_eos=True)))
    next(iter(stream))
    ledger = hosted.meter.read(hosted.backend.memory(), hosted.backend.stats())
    stream.close()
    hosted.backend.close()
    weights, cache = ledger.row("weights"), ledger.row("KV cache")
    assert weights is not None
    assert weights.measured_bytes == pytest.approx(weights.planned_bytes, rel=0.01)  # and a few buffers
    assert cache is not None
    assert cache.planned_bytes
    assert cache.measured_bytes == cache.used_bytes
    assert 0 < (cache.measured_bytes or 0) <= cache.planned_bytes


def test_loading_asks_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("loading opened a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    assert answer(folder)


def test_a_folder_with_an_image_processor_missing_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"transformers can't load|image processor"):
        load_engine(broken, device="cpu")


def test_bitsandbytes_leaves_fused_experts_and_the_head_as_they_are() -> None:
    """Counted on transformers' own network without memory: experts are tensors of three dimensions there."""
    text = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 128}  # fmt: skip
    config = transformers.Qwen3MoeConfig(**text)
    with torch.device("meta"):
        network = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    attention = 4 * 64 * 64 * 2
    whole = sum(each.numel() for each in network.parameters())
    experts = 2 * 8 * 3 * 64 * 32
    for weights, each in (("int8", 1.0), ("int4", 0.5625)):
        left = by_bits_bytes(network, weights) - attention * each
        assert left >= 2 * (experts + 128 * 64), "experts and head in bf16"
        assert 2 * (whole - attention) - 2 * 2 * 8 * 64 <= left <= 2 * (whole - attention)
