"""Models that see no pictures, by nature or because their tower was left out: the same on every engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snugvl.errors import RequestError
from tests import text_checkpoints
from tests.backends.contract.conftest import POCKET
from tests.backends.contract.engines import BLIND, IN_PROCESS, Running
from tests.backends.contract.requests import QUESTION, asked, picture, texts
from tests.inputs.conftest import write_checkpoint


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with the tokenizer of the others."""
    folder = write_checkpoint(tmp_path_factory.mktemp("text"))
    (folder / "preprocessor_config.json").unlink()
    (folder / "video_preprocessor_config.json").unlink()
    (folder / "chat_template.jinja").write_bytes((POCKET / "chat_template.jinja").read_bytes())
    qwen3 = text_checkpoints.MODELS["qwen3"]
    sizes = {"vocab_size": 512, "max_position_embeddings": 2048}
    return text_checkpoints.write(folder, replace(qwen3, values=qwen3.values | sizes))


@pytest.fixture(scope="session", params=IN_PROCESS)
def of_text(request: pytest.FixtureRequest, text_model: Path) -> Iterator[Running]:
    """A text model on each engine."""
    made = Running(request.param, IN_PROCESS[request.param](text_model))
    yield made
    made.close()


@pytest.fixture(scope="session", params=BLIND)
def without_tower(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Running]:
    """The model that sees, without its tower, on each engine."""
    made = Running(request.param, BLIND[request.param](checkpoint))
    yield made
    made.close()


def refuses_pictures(running: Running) -> str:
    assert not running.capabilities.images
    assert not running.capabilities.video
    with pytest.raises(RequestError) as caught:
        running.ask(asked(picture(), QUESTION))
    assert caught.value.field is not None
    assert caught.value.field.startswith("messages")
    assert running.ask(asked(max_tokens=3))[-1].finish_reason == "length"
    assert "pictures" in str(caught.value)
    return str(caught.value)


def test_a_text_model_refuses_pictures_and_names_one_that_sees(of_text: Running) -> None:
    assert of_text.capabilities.architecture == "Qwen3ForCausalLM"
    assert "Qwen3-VL" in refuses_pictures(of_text)


def test_a_text_model_answers_as_on_our_own_engine(of_text: Running, text_model: Path) -> None:
    native = Running("native", IN_PROCESS["native"](text_model))
    request = asked(max_tokens=48)
    expected = native.ask(request)
    native.close()
    deltas = of_text.ask(request)
    assert (texts(deltas), deltas[-1].usage) == (texts(expected), expected[-1].usage)


def test_without_its_tower_a_model_answers_text_as_before(without_tower: Running, reference: Running) -> None:
    assert "without its vision tower" in refuses_pictures(without_tower)
    assert without_tower.text(asked()) == reference.text(asked())
