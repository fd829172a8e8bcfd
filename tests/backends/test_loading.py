"""What loading tells while it goes, what it was planned to take, and what it must not import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import snugvl
from snugvl.backends.native.loading import load_engine
from snugvl.core.messages import Message, Request, Text, user
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError


def test_progress_runs_from_nearly_zero_to_nearly_one(folder: Path) -> None:
    told: list[tuple[str, float]] = []
    with snugvl.load(folder, device="cpu", progress=lambda detail, done: told.append((detail, done))):
        pass
    details, shares = zip(*told, strict=True)
    assert details[0] == "reading headers"
    assert details[-1] == "allocating the KV cache"
    assert any(detail.startswith("loading weights (") for detail in details)
    assert len([detail for detail in details if detail.startswith("loading weights")]) <= 101
    assert list(shares) == sorted(shares)
    assert 0 < shares[0] < 0.05  # the server takes it for: torch is imported
    assert shares[-1] == 0.9


def test_the_plan_of_what_was_loaded(folder: Path) -> None:
    loaded = load_engine(LoadOptions(str(folder), device="cpu", dtype="auto", context=512, max_waiting=3))
    try:
        assert loaded.backend._engine.config.max_waiting == 3
        memory = loaded.backend.memory()
        assert loaded.planned["KV cache"] >= memory["kv_cache"] > 0
        assert sum(loaded.weights.values()) == memory["weights"]
        for name in ("text weights", "vision weights"):
            assert loaded.planned[name] == loaded.weights[name]
        assert loaded.planned["workspace"] > 0
        assert loaded.backend.capabilities.device == "CPU"
        assert loaded.backend.capabilities.dtype == "float32"
    finally:
        loaded.backend.close()


def asked(count: int) -> Request:
    """A request with so many pictures, one in each of its user's messages."""
    picture = Image.new("RGB", (32, 32), "red")
    turns = [
        turn for _ in range(count) for turn in (user(picture, "?"), Message("assistant", (Text("So."),)))
    ]
    return Request((*turns, user("And?")), SamplingParams(max_tokens=1))


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_as_many_pictures_as_were_asked_for(backend: Any) -> None:
    with snugvl.load("pocket", device="cpu", backend=backend, images=2) as model:
        if model.capabilities.plan is not None:
            assert model.capabilities.plan.settings["images"] == 2
        assert [delta.finish_reason for delta in model.backend.submit(asked(2))][-1] == "length"
        with pytest.raises(
            RequestError, match=r"has 4 pictures, .* at most 2 \(--images 2\); .* --images 4"
        ) as raised:
            model.backend.submit(asked(4))
        assert raised.value.field == "messages[4].content"


def test_a_model_for_text_alone_and_one_whose_pictures_nobody_counted() -> None:
    with snugvl.load("pocket", device="cpu", images=0) as model:
        with pytest.raises(RequestError, match=r"to take none \(--images 0\)"):
            model.backend.submit(asked(1))
        list(model.backend.submit(asked(0)))
    with snugvl.load("pocket", device="cpu") as model:
        assert model.capabilities.most_images is None
        list(model.backend.submit(asked(3)))


@pytest.mark.slow
def test_loading_imports_nothing_that_takes_long() -> None:
    """Some functions of torch import sympy where tensors have no memory, which takes half a second, and
    `torch._dynamo` takes longer than pocket takes to load; in every format of the weights.
    """
    code = (
        "import sys, snugvl\n"
        "for weights in ('bf16', 'int8', 'int4', 'int6'):\n"
        "    with snugvl.load('pocket', device='cpu', weights=weights): pass\n"
        "print(sorted({'sympy', 'torch._dynamo', 'scipy', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
