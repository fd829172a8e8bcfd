"""A GGUF in `snugvl.load`: pocket sees on llama.cpp what it sees on our own engine; nothing is left."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from training.gguf_export import export

import snugvl
from snugvl.backends.llamacpp import loading
from snugvl.checkpoint.locate import POCKET, locate
from snugvl.checkpoint.read import facts_of
from snugvl.core.messages import Request, user
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.errors import EngineError, RequestError
from snugvl.hardware.devices import with_others
from snugvl.hardware.machine import Machine
from snugvl.planner.engines.llamacpp.rules import llamacpp_arguments
from tests.backends.vllm.real.install import missing
from tests.hardware.listings import LISTINGS

PICTURE = Path(__file__).parents[3] / "examples/images/shapes.png"
PIXELS = 73_728  # that pocket was trained on, which no GGUF tells


def test_what_is_no_gguf_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="reads GGUF files"):
        snugvl.load("pocket", backend="llamacpp")


@pytest.mark.parametrize(("name", "device"), [("rx-6950-xt-in-use", "Vulkan1"), ("macbook-m1-8gb", "MTL0")])
def test_a_gpu_that_torch_does_not_know_is_planned_for(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, each = tmp_path / "pocket.gguf", LISTINGS[name]
    export(str(locate(POCKET)), file)
    machine = with_others(Machine("linux", (), 8, 32 << 30, each.free_gib << 30, 1 << 40), each.text)
    monkeypatch.setattr(loading, "probe", lambda: machine)
    monkeypatch.setattr(loading, "device_of", lambda _: torch.device("cpu"))
    facts = facts_of(str(file), offline=True)
    choice = loading._elsewhere(facts, LoadOptions(str(file)))
    assert choice is not None
    words = llamacpp_arguments(choice)
    assert words[words.index("-dev") + 1] == device
    assert loading._elsewhere(facts, LoadOptions(str(file), device="cpu")) is None
    monkeypatch.setattr(loading, "probe", lambda: replace(machine, others=()))
    assert loading._elsewhere(facts, LoadOptions(str(file))) is None


def test_pocket_sees_the_same(tmp_path: Path) -> None:
    if find_spec("xllamacpp") is None:
        missing("llama.cpp isn't installed: pip install xllamacpp")
    file = tmp_path / "pocket.gguf"
    export(str(locate(POCKET)), file)
    before = set(psutil.Process().children(recursive=True))
    request = Request((user("hi"),), SamplingParams(max_tokens=8, ignore_eos=True))
    with snugvl.load(file, backend="auto", device="cpu", max_pixels=PIXELS) as model:
        assert model.capabilities.engine == "llamacpp"
        caption = model.caption(PICTURE).text
        assert model.memory()["KV cache"] > 1 << 20
        plan = model.capabilities.plan
        assert plan is not None
        assert plan.settings["context"] == model.capabilities.context_tokens
        text = "".join(delta.text for delta in model.backend.submit(request))

        async def read() -> str:
            return "".join([delta.text async for delta in model.backend.submit(request)])

        assert asyncio.run(read()) == text != ""
        assert set(psutil.Process().children(recursive=True)) - before
    assert not set(psutil.Process().children(recursive=True)) - before
    with pytest.raises(EngineError, match="closed"):
        model.backend.submit(request)
    with snugvl.load("pocket", device="cpu") as ours:
        assert ours.caption(PICTURE).text == caption
