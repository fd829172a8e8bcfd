"""Loading in each format on a CPU: what is planned is what is held."""

import inspect
from contextlib import closing
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from PIL import Image

from snugvl.backends.native.loading import load_engine
from snugvl.backends.process import engine_process
from snugvl.backends.process.wire import EngineChoice
from snugvl.core.messages import Picture, Request, Video, user
from snugvl.core.options import CHOICES, LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError
from snugvl.loading import load


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", "bfloat16"), ("int8", "auto"), ("int4", "bfloat16")])
def test_formats_by_wish(weights: Any, dtype: Any) -> None:
    loaded = load_engine(LoadOptions("pocket", device="cpu", dtype=dtype, weights=weights, context=512))
    try:
        assert loaded.backend.capabilities.weights == weights
        for name in ("text weights", "vision weights"):
            assert loaded.planned[name] == loaded.weights[name]
        assert loaded.cap_bytes is None
        assert "int" not in weights or weights in loaded.allocation.subject
    finally:
        loaded.backend.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_a_prompt_starts_from_an_earlier_one_unless_it_must_not(wanted: bool) -> None:
    loaded = load_engine(
        LoadOptions("pocket", device="cpu", dtype="float32", context=512, prefix_cache=wanted)
    )
    with closing(loaded.backend) as backend:
        request = Request((user("What is in this image, please? " * 4),), SamplingParams(max_tokens=1))
        for _ in range(2):
            list(backend.submit(request))
        stats = backend.stats()
    assert (stats.prefix_hit_tokens > 0) == (stats.prefix_query_tokens > 0) == wanted


def test_auto_on_a_cpu_takes_the_dtype() -> None:
    loaded = load_engine(LoadOptions("pocket", device="cpu", dtype="bfloat16", context=512, memory="2GiB"))
    try:
        assert loaded.backend.capabilities.weights == "bf16"
        assert sum(loaded.planned.values()) <= 2 << 30
    finally:
        loaded.backend.close()


def test_a_video_has_no_more_patches_than_the_largest_picture() -> None:
    loaded = load_engine(LoadOptions("pocket", device="cpu", dtype="auto", context=512, max_pixels=32_768))
    try:
        frame = Image.new("RGB", (400, 400))
        video = Video((frame,) * 8, tuple(float(second) for second in range(8)))
        for part in (Picture(frame), video):
            assert 0 < loaded.backend.tokenize(Request((user(part, "?"),))).image_tokens <= 32
    finally:
        loaded.backend.close()


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("name", ["prefix_cache", "step_graphs"])
def test_the_engine_process_is_told(name: str, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: LoadOptions, **_: Any) -> None:
        raise RuntimeError(str(getattr(options, name)))

    monkeypatch.setattr("snugvl.backends.native.loading.load_engine", load)
    with pytest.raises(RuntimeError, match=str(wanted)):
        engine_process.load(EngineChoice(**{name: wanted}), lambda _detail, _done: None)


def test_what_it_takes_is_written_down_for_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr("snugvl.backends.native.remember.keeper", lambda *of: kept.append(of))
    choice = EngineChoice(device="cpu", dtype="float32", context=512)
    engine_process.load(choice, lambda _detail, _done: None).backend.close()
    ((_, subject, graphs, _, about),) = kept
    assert about["network"] == "Qwen3VLForConditionalGeneration", "for a report"
    assert subject.startswith("pocket native")
    assert graphs == 0, "none on a CPU"


SERVERS = {"max_waiting"}  # options that a program would only get in its own way with


def test_load_has_every_option_and_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are written out for editors: one that is missing, or not passed on, fails here."""
    seen: list[LoadOptions] = []
    monkeypatch.setattr("snugvl.loading.load_with", lambda options, _: seen.append(options))
    arguments = inspect.signature(load).parameters
    rows = {each.name: each for each in fields(LoadOptions) if each.name not in SERVERS}
    assert arguments.keys() - {"progress"} == rows.keys()
    hints, given = get_type_hints(load), get_type_hints(LoadOptions)
    for name in rows.keys() - {"model"}:
        assert hints[name] == given[name], name
        if name != "backend":
            assert arguments[name].default == rows[name].default, name
        default = rows[name].default
        values = [*CHOICES.get(name, ()), 4096, "cpu", not default]
        value = next(each for each in values if each != default and _fits(each, given[name]))
        load("pocket", **{"backend": "auto", name: value})
        assert seen[-1] == LoadOptions("pocket", **{name: value}), name


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation's type."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) in (get_args(hint) or (hint,))


def test_a_cache_in_fp8_is_planned_held_and_told() -> None:
    loaded = {
        kind: load_engine(LoadOptions("pocket", device="cpu", dtype="float32", context=512, kv_cache=kind))
        for kind in ("auto", "fp8")
    }
    try:
        wide, narrow = (loaded[kind].backend for kind in ("auto", "fp8"))
        assert (wide.capabilities.kv_cache, narrow.capabilities.kv_cache) == ("fp32", "fp8")
        assert narrow.memory()["kv_cache"] * 4 == wide.memory()["kv_cache"]
        for each in loaded.values():
            assert each.planned["KV cache"] == each.backend.memory()["kv_cache"]
        assert loaded["auto"].allocation.subject != loaded["fp8"].allocation.subject
    finally:
        for each in loaded.values():
            each.backend.close()


def test_formats_of_the_cache_that_can_not_be_are_refused() -> None:
    with pytest.raises(RequestError, match="kv_cache 'int8' is unknown; use auto, bf16, fp8"):
        LoadOptions("pocket", device="cpu", dtype="float32", kv_cache="int8")  # type: ignore[arg-type]
    with pytest.raises(
        RequestError, match='kv_cache="fp8" is not for transformers; say backend="native", or'
    ):
        load("pocket", device="cpu", backend="transformers", kv_cache="fp8")
