"""A GGUF without its mmproj: the refusal of a picture names the file, the reason and what to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from snugvl.backends.child.settings import Facts
from snugvl.backends.llamacpp import facts
from snugvl.backends.llamacpp.facts import GgufModel, read_model
from snugvl.backends.llamacpp.requests import _picture
from snugvl.core.messages import Picture
from snugvl.errors import RequestError


def refusal(model: GgufModel, file: str) -> str:
    speaker = SimpleNamespace(
        model=SimpleNamespace(facts=Facts(images=False)), gguf=model, served=SimpleNamespace(root=file)
    )
    with pytest.raises(RequestError) as refused:
        _picture(Picture(Image.new("RGB", (4, 4))), "messages[0].content", cast("Any", speaker))
    return str(refused.value)


def test_a_file_without_its_tower(tmp_path: Path) -> None:
    (file := tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF of a kind that can't be planned")
    said = refusal(read_model(str(file), None, ()), str(file))
    assert said == (
        f"{file} takes no pictures: no mmproj, which is its vision tower, lies beside it; put the mmproj "
        f"file of this model into {tmp_path}, or name another model, or send text only"
    )


def test_a_tower_that_was_left_out_on_purpose(tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    said = refusal(read_model(str(file), None, ("--no-mmproj",)), str(file))
    assert said.startswith(f"{file} takes no pictures: it was started so (--language-only, or")


def test_a_tower_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "model.gguf").write_bytes(b"GGUF")
    why = "mmproj-x.gguf is left out, so the model sees no pictures: it gives 5 values."
    found = SimpleNamespace(architecture="x", vision=None, gguf=SimpleNamespace(file_type="F32", unlike=why))
    monkeypatch.setattr(facts, "facts_of", lambda *_, **__: found)
    monkeypatch.setattr(facts, "control_tokens", lambda _: ())
    assert f"{why[:-1]}; put the mmproj file of this model into" in refusal(
        read_model(str(file), None, ()), "x"
    )


def test_a_file_of_another_machine() -> None:
    said = refusal(read_model("/not/here.gguf", None, ()), "/not/here.gguf")
    assert "started without an mmproj; start it with --mmproj FILE, or send text only" in said
