"""Text models from a folder to answers: as transformers answers; pictures refused; towers left out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer

import snugvl
from snugvl.backends.native.backend import NativeBackend
from snugvl.backends.native.loading import LoadedEngine, load_engine
from snugvl.core.messages import Message, Picture, Request, Text, user
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.models.loader import load_model
from tests import text_checkpoints
from tests.inputs import pieces
from tests.models.forward import Prompt, logits

CPU = torch.device("cpu")
# Random weights write broken UTF-8, which a stream spells otherwise than a whole text: no bytes above ASCII.
BROKEN = range(3 + 128, 3 + 256)
SAMPLING = SamplingParams(max_tokens=64, ignore_eos=True, logit_bias=dict.fromkeys(BROKEN, -100.0))
PICTURE = Image.new("RGB", (64, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral with a window, and a tokenizer of SentencePiece's pieces."""
    folder = pieces.write(tmp_path_factory.mktemp("text") / "mistral")
    text = text_checkpoints.MODELS["mistral"]
    return text_checkpoints.write(folder, replace(text, values=text.values | {"vocab_size": 384}))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    with snugvl.load(folder, device="cpu", dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(
        folder
    )


def new_tokens(oracle: Any, ids: list[int]) -> list[int]:
    made: list[int] = oracle[0].generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=64, do_sample=False,
        eos_token_id=None, pad_token_id=0, suppress_tokens=list(BROKEN),
    )[0, len(ids) :].tolist()  # fmt: skip
    return made


def text_of(model: Any, request: snugvl.Request) -> str:
    return "".join(delta.text for delta in model.backend.submit(request))


def test_a_conversation_as_transformers_continues_it(model: Any, oracle: Any) -> None:
    messages = [Message("system", (Text("the lazy dog"),)), user("the quick brown fox?")]
    tokenizer = oracle[1]
    plain = [{"role": m.role, "content": m.content[0].text} for m in messages]  # type: ignore[union-attr]
    ids = tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert ids.count(1) == 1  # the template writes "<s>", and nobody writes it again
    assert list(model.backend.tokenize(Request(tuple(messages))).ids) == ids
    expected = tokenizer.decode(new_tokens(oracle, ids), skip_special_tokens=True)
    assert text_of(model, snugvl.Request(tuple(messages), SAMPLING)) == expected
    assert model.chat(messages, SAMPLING).text == expected


def test_a_bare_prompt_is_framed_and_goes_on(model: Any, oracle: Any) -> None:
    ids = oracle[1]("the quick")["input_ids"]
    assert ids[0] == 1
    assert list(model.backend.tokenize(Request(prompt="the quick")).ids) == ids
    tokens = new_tokens(oracle, ids)
    whole = oracle[1].decode([*ids, *tokens], skip_special_tokens=True)
    asked = snugvl.Request(prompt="the quick", sampling=SAMPLING)
    assert "the quick" + text_of(model, asked) == whole


def test_an_answer_begins_without_the_space_that_a_continuation_has(model: Any) -> None:
    (word,) = model.backend.tokenize(Request(prompt="the")).ids[1:]
    forced = SamplingParams(max_tokens=2, ignore_eos=True, logit_bias={word: 100.0})
    assert text_of(model, snugvl.Request((user("a"),), forced)) == "the the"
    assert text_of(model, snugvl.Request(prompt="a", sampling=forced)) == " the the"


def test_what_it_can_do(model: Any) -> None:
    able = model.capabilities
    assert (able.images, able.video, able.max_pixels, able.min_pixels) == (False, False, 0, 0)
    assert able.architecture == "MistralForCausalLM"
    assert not able.language_only


@pytest.mark.parametrize("ask", ["caption", "scene", "detect", "ask", "chat"])
def test_pictures_are_refused_with_a_model_that_sees(ask: str, model: Any) -> None:
    more = ("What?",) if ask == "ask" else ()
    given = user(PICTURE, "What?") if ask == "chat" else PICTURE
    with pytest.raises(RequestError, match=r"reads text alone .* such as Qwen/Qwen3-VL-2B-Instruct-FP8"):
        getattr(model, ask)(given, *more)


def test_a_picture_in_an_earlier_message_is_found(model: Any) -> None:
    messages = (user(Picture(PICTURE)), Message("assistant", (Text("no"),)), user("why?"))
    with pytest.raises(RequestError, match="reads text alone") as caught:
        model.backend.submit(snugvl.Request(messages))
    assert caught.value.field == "messages[0].content"


def test_planned_is_held(folder: Path) -> None:
    loaded = load_engine(LoadOptions(str(folder), device="cpu", dtype="float32"))
    try:
        assert loaded.planned["text weights"] == loaded.weights["text weights"] > 0
        assert loaded.planned["vision weights"] == loaded.weights["vision weights"] == 0
        assert loaded.planned["encoder outputs"] == 0
        # The plan rounds one conversation's cache up to a segment of torch's; this one is tiny.
        assert 0 <= loaded.planned["KV cache"] - loaded.backend.memory()["kv_cache"] < 16 << 20
        assert loaded.left_out_bytes == 0
    finally:
        loaded.backend.close()


def test_long_rope_beyond_its_original_context_is_refused(tmp_path: Path) -> None:
    folder = pieces.write(tmp_path)
    text = text_checkpoints.MODELS["phi-3 long"]
    text_checkpoints.write(folder, replace(text, values=text.values | {"vocab_size": 384}))
    with pytest.raises(
        RequestError, match=r"ends at 128 tokens here, 400 are asked for; transformers goes up to 512"
    ):
        load_engine(LoadOptions(str(folder), device="cpu", dtype="float32", context=400))
    loaded = load_engine(LoadOptions(str(folder), device="cpu", dtype="float32"))
    assert loaded.backend.capabilities.context_tokens == 128
    loaded.backend.close()


@pytest.fixture(scope="module")
def blind() -> Any:
    """Pocket without its tower."""
    told: list[str] = []
    options = LoadOptions("pocket", device="cpu", dtype="float32", context=256, language_only=True)
    loaded = load_engine(options, progress=lambda detail, _done: told.append(detail))
    yield loaded, told
    loaded.backend.close()


def test_a_tower_left_out_is_not_loaded_and_said(blind: tuple[LoadedEngine, list[str]]) -> None:
    loaded, told = blind
    whole = load_engine(LoadOptions("pocket", device="cpu", dtype="float32", context=256))
    whole.backend.close()
    assert loaded.left_out_bytes == whole.weights["vision weights"] == whole.planned["vision weights"] > 0
    assert loaded.weights == {"text weights": whole.weights["text weights"], "vision weights": 0}
    assert loaded.planned["vision weights"] == loaded.planned["encoder outputs"] == 0
    assert loaded.planned["text weights"] == loaded.weights["text weights"]
    assert loaded.planned["workspace"] < whole.planned["workspace"]
    assert any("leaving the vision tower out, which frees" in line for line in told)


def test_a_tower_left_out_refuses_pictures_and_reads_text(blind: tuple[LoadedEngine, list[str]]) -> None:
    backend = blind[0].backend
    assert isinstance(backend, NativeBackend)
    assert (backend.capabilities.images, backend.capabilities.language_only) == (False, True)
    with pytest.raises(RequestError, match=r"without its vision tower \(--language-only\)"):
        backend.submit(snugvl.Request((user(PICTURE, "What?"),)))
    request = snugvl.Request((user("What is this?"),), SamplingParams(max_tokens=8))
    text = "".join(delta.text for delta in backend.submit(request))
    with snugvl.load("pocket", device="cpu", dtype="float32", context=256) as whole:
        assert text_of(whole, request) == text


@pytest.mark.parametrize("name", ["tiny", "tiny_untied", "tiny_fp8"])
def test_logits_are_the_same_without_the_tower(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    whole = load_model(folder, dtype=torch.float32, device=CPU)
    blind = load_model(folder, dtype=torch.float32, device=CPU, language_only=True)
    assert blind.tower is None
    prompt = Prompt(list(range(10, 40)))
    assert torch.equal(logits(blind, prompt), logits(whole, prompt))


def test_backends_by_name(folder: Path, tmp_path: Path) -> None:
    from snugvl.loading import backend_for

    assert backend_for(LoadOptions(str(folder))) == "native"
    assert backend_for(LoadOptions(str(folder), backend="transformers")) == "transformers"
    (tmp_path / "config.json").write_text('{"architectures": ["SmolVLMForConditionalGeneration"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert backend_for(LoadOptions(str(tmp_path))) == "transformers"
    with pytest.raises(RequestError, match="backend 'vllm' runs behind `snugvl serve` alone"):
        snugvl.load(folder, backend="vllm")
    with snugvl.load(folder, backend="transformers", device="cpu", dtype="float32") as model:
        assert model.capabilities.engine == "transformers"
        assert not model.capabilities.images
