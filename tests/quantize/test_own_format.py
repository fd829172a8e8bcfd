"""Our own format: equal to what is rounded while loading, planned to the byte, read by our engine alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import snugvl
from snugvl.checkpoint.read import facts_of
from snugvl.cli.app import run
from snugvl.core.formats import FORMATS, INTEGERS
from snugvl.core.messages import user
from snugvl.core.sampling import SamplingParams
from snugvl.errors import CheckpointError, RequestError, SnugvlError, UnsupportedModel
from snugvl.layers.linear import Linear
from snugvl.models import loader
from snugvl.models.loader import Storage, load_model
from snugvl.models.networks import LoadableNetwork
from snugvl.planner.footprint.weights import joined, sizes, weight_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.command import Run
from tests.fidelity.conftest import POCKET, scene
from tests.models.forward import Prompt, logits
from tests.planner.machines import machine

CPU = torch.device("cpu")
PROMPT = Prompt(list(range(10, 40)))
Q = "model.language_model.layers.1.self_attn.q_proj"


def load(folder: Path, storage: Storage | None = None) -> LoadableNetwork:
    return load_model(folder, dtype=torch.float32, device=CPU, storage=storage)


def tensors(model: LoadableNetwork) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def held(model: LoadableNetwork) -> int:
    return sum(each.nbytes for each in {id(each): each for each in tensors(model).values()}.values())


def formats(model: LoadableNetwork) -> dict[str, str]:
    """Of the decoder's matrices."""
    layers = model.decoder.layers.named_modules()
    return {f"layers.{name}": each.format for name, each in layers if isinstance(each, Linear)}


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pocket as `--weights int4` rounds it."""
    out = tmp_path_factory.mktemp("own") / "int4"
    assert run(["quantize", "pocket", str(out), "--weights", "int4", "--device", "cpu", "--quiet"]) == 0
    return out


def test_a_copy_of_pocket_is_what_is_rounded_while_loading(
    pocket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tensors, the same tokens, and nothing is weighed for it."""
    wanted = tensors(load(POCKET, Storage("int4")))

    def ask(model: Path, **options: Any) -> str:
        request = snugvl.Request(
            messages=(user("What is this?", scene(0)),),
            sampling=SamplingParams(max_tokens=24, ignore_eos=True),
        )
        with snugvl.load(model, device="cpu", context=1024, **options) as made:
            assert made.capabilities.weights == "int4"
            return "".join(delta.text for delta in made.backend.submit(request))

    original = ask(POCKET, weights="int4")
    monkeypatch.setattr(loader, "_weigh_inputs", lambda *_: pytest.fail("inputs were weighed"))
    found = tensors(load(pocket))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    assert any(each.dtype == torch.int32 for each in wanted.values())
    assert ask(pocket) == original


@pytest.mark.parametrize("kind", ["int5", "int6"])
def test_copies_with_upper_bits(kind: Any, quantize: Run, tiny_whole: Path, tmp_path: Path) -> None:
    ran = quantize(tmp_path / "out", "--weights", kind, "--group", "32")
    assert ran.code == 0, ran.err
    bits = FORMATS[kind].bits
    assert f"{bits + 1:.2f} bits a weight in memory and in its files" in ran.out
    wanted, model = tensors(load(tiny_whole, Storage(kind, group=32))), load(tmp_path / "out")
    found = tensors(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())
    assert set(formats(model).values()) == {kind}
    facts = facts_of(str(tmp_path / "out"), offline=True)
    assert facts.quantization == kind
    assert weight_bytes(inventory(facts), Settings("native", kind, float32=True)) == held(model)


def test_mixed_widths_are_read_as_they_are_meant(
    quantize: Run, files: Path, tiny_whole: Path, tmp_path: Path
) -> None:
    """Four widths: the same logits as plain weights of the same values, the bytes and pieces of the plan."""
    out = tmp_path / "out"
    ran = quantize(out, "--with", files, "--bits", "5.7", "--json")
    assert ran.code == 0, ran.err
    made = json.loads(ran.out)
    assert 5.4 < made["bits"] <= 5.7
    model = load(out)
    assert {name: int(kind[3:]) for name, kind in formats(model).items()} == made["widths"]
    assert len(set(made["widths"].values())) > 2
    wide = load(tiny_whole)
    linears = [each for each in model.decoder.layers.modules() if isinstance(each, Linear)]
    twins = [each for each in wide.decoder.layers.modules() if isinstance(each, Linear)]
    for ours, theirs in zip(linears, twins, strict=True):
        values = ours.weights.wide(torch.float32)
        assert (values - theirs.weight).norm() < 0.2 * theirs.weight.norm()
        theirs.weight.copy_(values)
    norms = {name: each for name, each in model.decoder.layers.named_parameters() if "norm" in name}
    for name, theirs in wide.decoder.layers.named_parameters():
        if name in norms:  # factors of columns stand there
            theirs.copy_(norms[name])
    torch.testing.assert_close(logits(model, PROMPT), logits(wide, PROMPT), atol=1e-4, rtol=0)
    weights = sum(each.weight.numel() for each in twins)
    assert sum(8 * each.weights.nbytes for each in linears) / weights == pytest.approx(made["bits"])
    counted, settings = inventory(facts_of(str(out), offline=True)), Settings("native", "int4", float32=True)
    assert weight_bytes(counted, settings) == held(model)
    decoder = sum(size * count for size, count in sizes(counted, settings, "decoder"))
    pieces = list(joined(counted, settings))
    assert sum(size * count for size, count in pieces) == decoder
    module = {
        id(each): each for each in (*model.decoder.layers.parameters(), *model.decoder.layers.buffers())
    }
    norm = model.decoder.norm.weight
    assert sorted(size for size, count in pieces for _ in range(count)) == sorted(
        [each.nbytes for each in module.values()] + [norm.nbytes]
    )


def test_a_plan_of_a_copy_names_our_engine_alone(
    pocket: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["plan", str(pocket), "--verbose"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "with snugvl's own engine" in out
    assert "it doesn't read snugvl's own format; use our own engine (--backend native), or the" in out
    scene(0).save(tmp_path / "0.png")
    assert run(["caption", str(tmp_path / "0.png"), "-m", str(pocket), "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out.strip()
    why = {
        "transformers": "snugvl's own format",
        "vllm": "snugvl's own format",
        "llamacpp": "reads GGUF files",
    }
    for backend, said in why.items():
        assert run(["serve", str(pocket), "--device", "cpu", "--backend", backend]) == 5
        error = " ".join(capsys.readouterr().err.split())
        assert f"{pocket} with {backend}: " in error
        assert said in error
    with pytest.raises(RequestError, match=r"with transformers: it doesn't read snugvl's own format; use"):
        snugvl.load(pocket, backend="transformers", device="cpu")


def test_gpus_older_than_ampere_have_no_five_bits(quantize: Run, tmp_path: Path) -> None:
    ran = quantize(tmp_path / "out", "--weights", "int5", "--group", "32")
    assert ran.code == 0, ran.err
    model = facts_of(str(tmp_path / "out"), offline=True)
    refused = {}
    for capability in ((7, 5), (8, 0)):
        card = machine(8 << 30)
        card = replace(card, gpus=(replace(card.gpus[0], compute_capability=capability),))
        plan = solve([Candidate(model)], card, Wishes(context=512))
        refused[capability] = plan.choice is None
    assert refused == {(7, 5): True, (8, 0): False}


Change = Callable[[dict[str, torch.Tensor]], Any]
PROBLEMS: dict[str, tuple[Change, str]] = {
    "no scales": (lambda s: s.pop(f"{Q}.weight_scale"), "has no weight_scale beside it"),
    "no zero points": (lambda s: s.pop(f"{Q}.weight_zero"), "has no weight_zero beside it"),
    "no codes": (lambda s: s.pop(f"{Q}.weight_codes"), rf"lacks tensor '{Q}\.weight'"),
    "codes of another shape": (
        lambda s: s.update({f"{Q}.weight_codes": torch.zeros(32, 16, dtype=torch.int32)}),
        r"weight_codes' is I32 \[32, 16\], expected I32 \[64, 8\] for 64 x 64 weights in int5",
    ),
    "upper bits of another type": (
        lambda s: s.update({f"{Q}.weight_upper": torch.zeros(64, 8)}),
        "has narrowest matrices of 4 bits, but its config.json says int5",
    ),
    "too many scales": (
        lambda s: s.update(
            {f"{Q}.weight_{part}": torch.ones(64, 4).bfloat16() for part in ("scale", "zero")}
        ),
        r"has 4 scales for 64 columns; 32, 64, 128 columns share one",
    ),
    "wide scales": (
        lambda s: s.update({f"{Q}.weight_scale": torch.ones(64, 2)}),
        r"is F32 \[64, 2\], expected BF16 \[64, 2\]",
    ),
    "a foreign matrix": (
        lambda s: s.update(
            {
                f"router.weight_{part}": s[f"{Q}.weight_{part}"].clone()
                for part in ("codes", "upper", "scale", "zero")
            }
        ),
        r"'router\.weight_codes' does not belong to a",
    ),
}


@pytest.fixture(scope="module")
def fives(tiny_whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one file."""
    out = tmp_path_factory.mktemp("fives") / "out"
    arguments = ["--weights", "int5", "--group", "32", "--device", "cpu", "--quiet"]
    assert run(["quantize", str(tiny_whole), str(out), *arguments]) == 0
    whole = {name: each for path in out.glob("*.safetensors") for name, each in load_file(path).items()}
    for path in (*out.glob("*.safetensors"), out / "model.safetensors.index.json"):
        path.unlink()
    save_file(whole, out / "model.safetensors")
    return out


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_was_tampered_with_is_refused(problem: str, fives: Path, tmp_path: Path) -> None:
    change, message = PROBLEMS[problem]
    broken = Path(shutil.copytree(fives, tmp_path / "broken"))
    state = load_file(broken / "model.safetensors")
    change(state)
    save_file(state, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(broken)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"version": 2}, UnsupportedModel, "is of version 2 of our own format, and this snugvl reads 1"),
        ({"weights": "int9"}, CheckpointError, f"weights is 'int9'; it is one of {', '.join(INTEGERS)}"),
        ({"weights": ["int5"]}, CheckpointError, f"it is one of {', '.join(INTEGERS)}"),
        (
            {"weights": "int4"},
            CheckpointError,
            "has narrowest matrices of 5 bits, but its config.json says int4",
        ),
        (
            {"quant_method": "snug"},
            UnsupportedModel,
            "'snug'; fp8, compressed-tensors, awq, gptq, auto",
        ),
    ],
)
def test_a_configuration_that_says_something_else(
    settings: dict[str, Any], error: type[SnugvlError], message: str, fives: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(fives, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"] |= settings
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load(broken)


def test_torn_files_are_refused_by_every_command(
    pocket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes against the header; a shard that isn't there."""
    broken = Path(shutil.copytree(pocket, tmp_path / "broken"))
    shard = sorted(broken.glob("*.safetensors"))[1]
    scene(0).save(tmp_path / "0.png")
    commands = (
        ["plan", str(broken)],
        ["caption", str(tmp_path / "0.png"), "-m", str(broken), "--device", "cpu"],
    )
    shard.write_bytes(shard.read_bytes()[:-100])
    for command in commands:
        assert run(command) == 4
        assert shard.name in (said := capsys.readouterr().err)
        assert "Traceback" not in said
    shard.unlink()
    for command in commands:
        assert run(command) == 4
        assert "1 of 7 weight files are missing" in " ".join(capsys.readouterr().err.split())
