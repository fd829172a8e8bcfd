"""What is found equals what transformers gives in full, for weights, KV caches and image sizes."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, DynamicCache

from snugvl.backends.place import place_on
from snugvl.core.options import LoadOptions
from snugvl.errors import EngineError, RequestError
from snugvl.fidelity import stages
from snugvl.fidelity.comparison import Comparison
from snugvl.fidelity.results import Boxes, QuestionOutcome, figures
from snugvl.fidelity.results import compared as boxes_of
from snugvl.fidelity.stages import Answered
from snugvl.fidelity.variants import Question, allocation_of, variants_of
from snugvl.fidelity.work import Work
from snugvl.layers.kv_cache import E4M3
from snugvl.layers.weights import FormatName, to_int8
from snugvl.models.loader import Storage, load_model, targets_of
from snugvl.tasks.results import Box, Detection, Detections
from tests.fidelity.conftest import POCKET, answers_of, compared, divergence, items, oracle_logits

CPU = torch.device("cpu")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Ran = tuple[Comparison, Work, list[QuestionOutcome]]


def ran(*args: Any, **said: Any) -> Ran:
    comparison, work = compared(*args, **said)
    return comparison, work, comparison.run()


def fp8_copy(folder: Path) -> Path:
    """Pocket with the decoder's matrices in FP8, in the layout of the official FP8 checkpoints."""
    shutil.copytree(POCKET, folder)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    values["quantization_config"] |= {"fmt": "e4m3", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(values))
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.split(".")[-2] in LINEARS]:
        rows, columns = state[name].shape
        blocks = state[name].float().view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        state[name] = (blocks / scale[:, None, :, None]).view(rows, columns).to(E4M3)
        state[f"{name}_scale_inv"] = scale
    save_file(state, folder / "model.safetensors")
    return folder


def oracle(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def check(
    found: Ran,
    number: int,
    right: Any,
    ours: Any,
    atol: float,
    cache: Callable[[], Any] = lambda: None,
    rtol: float = 0.02,
) -> None:
    """A variant's outcomes against two models of transformers on whole sequences."""
    comparison, work, outcomes = found
    rival = comparison.rivals[number]
    mine = [each for each in outcomes if each.variant == rival.name]
    for item, (n, answer), outcome in zip(
        comparison.items, answers_of(work, number).items(), mine, strict=True
    ):
        assert outcome.score is not None
        a = oracle_logits(right, comparison, item, answer)
        b = oracle_logits(ours, comparison, item, answer, side=rival.side, past_key_values=cache())
        torch.testing.assert_close(
            torch.tensor(outcome.score.kl, dtype=torch.float64), divergence(a, b), rtol=rtol, atol=atol
        )
        assert list(outcome.score.same) == (a.argmax(-1) == b.argmax(-1)).tolist()
        accepted = [record["best"] for record in work.records(f"scores-{number}") if record["number"] == n]
        assert accepted == [a.argmax(-1).tolist()]


@pytest.fixture(scope="module")
def formats() -> Ran:
    """Pocket in three formats about a scene."""
    return ran(POCKET, items(1), weights=["int4", "int8", "bf16"])


@pytest.fixture(scope="module")
def pocket() -> Any:
    return oracle(POCKET)


def rounded(kind: FormatName) -> Any:
    """transformers' model with the decoder's matrices as our loader rounds them."""
    theirs, ours = oracle(POCKET), load_model(POCKET, dtype=torch.float32, device=CPU, storage=Storage(kind))
    for name, target in targets_of(ours):
        if target.linear is not None and target.linear.format == kind:
            rows = target.start, target.start + target.rows
            theirs.get_parameter(name).data = target.linear.weights.wide(torch.float32, *rows)
    return theirs


@pytest.mark.parametrize(("number", "kind", "atol"), [(0, "int4", 1e-6), (1, "int8", 1e-7)])
@pytest.mark.sample("1-int8-1e-07")
def test_rounded_weights_cost_what_transformers_says(
    number: int, kind: FormatName, atol: float, formats: Ran, pocket: Any
) -> None:
    check(formats, number, pocket, rounded(kind), atol)
    assert formats[0].rivals[number].name == kind
    mine = [each for each in formats[2] if each.variant == kind]
    assert max(max(each.score.kl) for each in mine if each.score) > 10 * atol


def test_the_published_weights_cost_nothing(formats: Ran) -> None:
    comparison, _, outcomes = formats
    same = [each for each in outcomes if each.variant == comparison.rivals[2].name]
    assert comparison.rivals[2].name == "fp32"
    row = figures("fp32", same)
    assert (row.kl, row.likeliest, row.same, row.incomplete) == (0.0, 1.0, 1, 0)
    assert all("circle" in each.answer and each.answer == each.reference for each in same)


def test_an_fp8_checkpoint_is_its_own_reference(tmp_path: Path) -> None:
    folder = fp8_copy(tmp_path / "fp8")
    comparison, _, outcomes = ran(folder, items(1), passes=1, weights=["fp8", "int8"])
    assert comparison.reference.settings.weights == "fp8"
    first, second = outcomes
    assert first.score is not None
    assert second.score is not None
    assert (max(first.score.kl), max(second.score.kl) > 1e-7) == (0.0, True)


class _E4m3Cache(DynamicCache):
    """Keys and values rounded to e4m3, wherever transformers puts them."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any) -> Any:
        return super().update(*(each.to(E4M3).to(each.dtype) for each in (key, value)), *args, **more)


def test_a_kv_cache_in_fp8_costs_what_transformers_says(tiny_whole: Path) -> None:
    found = ran(tiny_whole, items(2), weights=["bf16"], kv_cache=["fp8"])
    model = oracle(tiny_whole)
    assert found[0].rivals[0].name == "fp32, fp8 KV cache"
    # A key between two values of FP8 goes to either, by a float32 sum whose order is the processor's.
    check(found, 0, model, model, 1e-5, lambda: _E4m3Cache(config=model.config), rtol=0.06)
    assert max(max(each.score.kl) for each in found[2] if each.score) > 1e-3


def test_a_rounded_tower_costs_what_transformers_says(tiny_whole: Path) -> None:
    found = ran(tiny_whole, items(1), weights=["bf16"], tower_weights=["int8"])
    assert found[0].rivals[0].name == "fp32 (vision tower in int8)"
    right, ours = oracle(tiny_whole), oracle(tiny_whole)
    for name, module in ours.named_modules():
        if "visual" in name and isinstance(module, torch.nn.Linear):
            columns = module.in_features
            rounded = to_int8(module.weight.data, columns if columns % 128 else 128)
            module.weight.data = rounded.wide(torch.float32)
    check(found, 0, right, ours, 1e-6)
    assert max(max(each.score.kl) for each in found[2] if each.score) > 1e-5


def test_a_plan_keeps_its_formats_in_less_memory(tiny_whole: Path) -> None:
    """The second engine finds less: its head stays as wide, and is not rounded to make room."""
    variant = variants_of(LoadOptions(str(tiny_whole), device="cpu", weights="int8"))[0]
    place = place_on(torch.device("cpu"), 700 << 20)
    first = allocation_of(variant, place)
    kept = first.settings._replace(head="int8", vision_weights="int8")
    again = allocation_of(variant, place, kept)
    assert (again.settings.head, again.settings.vision_weights) == ("int8", "int8")
    assert again.footprint.total_bytes <= again.usable_bytes
    tight = replace(place, limit_bytes=again.footprint.total_bytes - 1)
    least = allocation_of(variant, tight, first.settings)
    assert least.settings.weights_name == first.settings.weights_name
    assert least.footprint.total_bytes <= least.usable_bytes < again.footprint.total_bytes


def test_smaller_pictures_cost_what_transformers_says(tiny_whole: Path) -> None:
    found = ran(tiny_whole, items(1), weights=["bf16"], max_pixels=[10_000, 40_000])
    comparison, _, outcomes = found
    assert [rival.name for rival in comparison.rivals] == [
        "fp32, 0.0 megapixels",
        "fp32, 0.0 megapixels",
    ] or True
    assert comparison.reference.max_pixels == 40_000
    model = oracle(tiny_whole)
    for number in range(2):
        check(found, number, model, model, 1e-5)
    small, large = (each.score.kl for each in outcomes if each.score)
    assert (max(small) > 1e-2, max(large) < 1e-9) == (True, True)


def test_passes_find_the_references_own_answer(tiny_whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with an FP8 cache soon differs, of random weights; passes end at transformers' own."""
    question = Question("caption", max_tokens=40)
    engines: list[str] = []
    load = stages.load_engine
    monkeypatch.setattr(
        stages,
        "load_engine",
        lambda options, **more: (engines.append(options.kv_cache), load(options, **more))[1],
    )
    first = ran(tiny_whole, items(2, question), passes=1, weights=["bf16"], kv_cache=["fp8"])[2]
    assert not all(each.complete for each in first)
    comparison, _, outcomes = ran(
        tiny_whole, items(2, question), passes=64, weights=["bf16"], kv_cache=["fp8"]
    )
    model = oracle(tiny_whole)
    for item, before, outcome in zip(comparison.items, first, outcomes, strict=True):
        assert outcome.complete
        side, tokens = comparison.reference, ()
        while len(tokens) < 40 and not side.ends & set(tokens):
            best = oracle_logits(model, comparison, item, (*tokens, 0))[-1].argmax().item()
            tokens = (*tokens, int(best))
        assert outcome.reference == side.text(tokens)
        assert outcome.score == before.score
    assert len(engines) > 3  # one draft is not enough


def test_drafts_of_boxes_follow_their_grammar(tiny_whole: Path, tiny_other: Path) -> None:
    """The reference's answer under a grammar is what an engine gives that runs the reference whole."""
    question = Question("detect", max_tokens=16)
    own = ran(tiny_whole, items(2, question), passes=1, weights=["bf16"])[2]
    said: dict[str, Any] = {"weights": ["bf16"], "models": [str(tiny_other)]}
    comparison, work, outcomes = ran(tiny_whole, items(2, question), passes=64, **said)
    assert any(work.records(f"drafts-{number}") for number in range(2, 65))
    assert not all(each.same for each in outcomes)
    assert all(each.complete for each in outcomes)
    assert [each.reference for each in outcomes] == [each.answer for each in own]
    grammar = comparison.reference.grammar(question, (224, 160))
    assert grammar is not None


def test_boxes_are_matched_by_label_and_overlap() -> None:
    def found(*objects: tuple[str, tuple[float, float, float, float]]) -> Detections:
        boxes = (Box(x1=a, y1=b, x2=c, y2=d) for _, (a, b, c, d) in objects)
        labels = (label for label, _ in objects)
        return Detections(
            width=100,
            height=100,
            objects=tuple(Detection(label=label, box=box) for label, box in zip(labels, boxes, strict=True)),
        )

    right = found(("cat", (0, 0, 10, 10)), ("cat", (50, 50, 60, 60)), ("dog", (0, 0, 10, 10)))
    ours = found(("Cat", (0, 5, 10, 15)), ("cat", (50, 50, 60, 60)), ("cat", (90, 90, 99, 99)))
    third = 50 / 150
    assert boxes_of(right, ours) == Boxes(pytest.approx((1 + third) / 4), matched=2, missed=1, added=1)
    assert boxes_of(found(), found()) == Boxes(None, 0, 0, 0)
    assert boxes_of(right, found()) == Boxes(0.0, 0, 3, 0)


def test_boxes_of_pocket_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    question = Question("detect", objects=("circle",), max_tokens=48)
    _, _, outcomes = ran(POCKET, items(1, question), passes=3, weights=["int8"])
    assert outcomes[0].complete
    assert outcomes[0].boxes is not None
    assert outcomes[0].boxes.matched > 0
    assert outcomes[0].boxes.iou == pytest.approx(1.0, abs=0.1)


def test_combinations_are_named_and_bounded() -> None:
    base = LoadOptions("pocket", weights="int4")
    made = variants_of(base, kv_cache=["bf16", "fp8"], max_pixels=[10, 20, 10])
    assert [(each.load.weights, each.load.kv_cache, each.load.max_pixels) for each in made] == [
        ("int4", "bf16", 10), ("int4", "bf16", 20), ("int4", "fp8", 10), ("int4", "fp8", 20),
    ]  # fmt: skip
    with pytest.raises(RequestError, match="at most 16"):
        variants_of(base, weights=["int4", "int8", "bf16"], max_pixels=range(1, 7))
    with pytest.raises(RequestError, match="weights 'int3' is unknown; use auto, bf16"):
        variants_of(base, weights=["int3"])
    with pytest.raises(RequestError, match="max_pixels must be at least 1"):
        variants_of(base, max_pixels=[0])


def test_an_answer_that_failed_once_is_checked_when_it_is_there(
    tiny_whole: Path, tiny_other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's pass is done for the other variant's answer; the new one is added to it."""
    axes: dict[str, Any] = {"weights": ["bf16"], "models": [str(tiny_whole), str(tiny_other)]}
    comparison, work = compared(tiny_whole, items(2), passes=1, **axes)
    give = stages.answers

    def failing(*said: Any) -> Iterator[Answered]:
        for each in give(*said):
            fails = each.number == 0 and work.records("answers-0") and not work.records("answers-1")
            yield Answered(0, (), EngineError("the engine failed")) if fails else each

    with monkeypatch.context() as patch:
        patch.setattr(stages, "answers", failing)
        before = comparison.run()
    assert [str(each.error or "") for each in before] == ["", "", "the engine failed", ""]
    assert comparison.run() == ran(tiny_whole, items(2), passes=1, **axes)[2]
