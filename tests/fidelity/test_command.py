"""`snugvl compare`: its table and records, what resumes, what it refuses."""

import json
import re
import signal
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from snugvl.fidelity import stages
from snugvl.fidelity.sweep import Sweep
from tests import text_checkpoints
from tests.checkpoint import gguf_samples
from tests.command import Ran, Run, ran
from tests.fidelity.conftest import scene


@pytest.fixture
def compare(tiny_whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("SNUGVL_DEBUG", raising=False)

    def compare(*args: object, model: object = tiny_whole) -> Ran:
        common = ("--device", "cpu", "--dtype", "float32", "--context", "1024")
        return ran(capsys, "compare", model, *args, *common)

    return compare


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        scene(number).save(folder / f"{number}.png")
    return folder


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


SHORT = ("--max-tokens", 6, "--passes", 2)


def test_a_table_and_what_differs(compare: Run, pictures: Path) -> None:
    ran = compare(
        pictures,
        "-q",
        "What?",
        "-q",
        "Where?",
        "--weights",
        "bf16",
        "--kv-cache",
        "bf16,fp8",
        "--max-tokens",
        20,
    )
    assert ran.code == 0, ran.err
    head, plain, fp8, *_ = ran.out.splitlines()
    assert head.split("  ")[-1] == "same answers"
    assert plain.split() == ["fp32", "0.00000", "±", "0.00000", "100.00%", "4", "of", "4"]
    assert fp8.startswith("fp32, fp8 KV cache ")
    assert float(fp8.split()[4]) > 1e-3
    plan, holds, takes, *stages = ran.err.splitlines()
    assert "as published (bf16" in plan
    assert plan.endswith("4 questions")
    assert re.search(
        r"memory: [\d.]+ GiB may be used; an engine takes [\d.]+ MiB, and then a reading of the reference "
        r"[\d.]+ MiB; at most [\d.]+ MiB are read from the disk",
        holds,
    )
    assert "the reading takes up to" in takes
    assert any("left)" in line for line in stages)


def test_records_of_answers_variants_and_the_run(compare: Run, pictures: Path) -> None:
    ran = compare(pictures, "--json", "--quiet", "--weights", "bf16", "--kv-cache", "fp8", *SHORT)
    assert (ran.code, ran.err) == (0, "")
    *answers, summary, whole = records(ran.out)
    assert [Path(each["image"]).name for each in answers] == ["0.png", "1.png"]
    first = answers[0]
    assert (first["task"], first["variant"]) == ("caption", "fp32, fp8 KV cache")
    result = first["result"]
    assert result.keys() == {
        "tokens", "kl", "kl_most", "likeliest", "answer", "reference", "complete", "same",
    }  # fmt: skip
    assert (result["tokens"], 0 < result["kl"] <= result["kl_most"]) == (6, True)
    mean = (
        sum(each["result"]["kl"] * each["result"]["tokens"] for each in answers)
        / summary["summary"]["tokens"]
    )
    assert summary["summary"]["kl"] == pytest.approx(mean)
    assert summary["summary"]["answers"] == 2
    assert whole["run"]["seconds"] > 0
    assert all(row["planned_bytes"] > 0 for row in whole["run"]["memory"])


def test_nothing_of_an_engine_stays_in_memory(
    compare: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card that holds one of both, the pass begins when the engine is gone."""
    engines: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    sweep, load = Sweep.run, stages.load_engine

    def loading(options: Any, **more: Any) -> Any:
        loaded = load(options, **more)
        engines.extend((weakref.ref(loaded.engine), weakref.ref(loaded.engine._runner.model)))
        return loaded

    def looking(one: Sweep) -> Any:
        alive.extend(each() is not None for each in engines)
        return sweep(one)

    monkeypatch.setattr(stages, "load_engine", loading)
    monkeypatch.setattr(Sweep, "run", looking)
    assert compare(pictures, "--weights", "bf16", *SHORT).code == 0
    assert alive == [False] * 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])  # `timeout` and systemd send the second
@pytest.mark.sample("15")
def test_an_interrupted_comparison_goes_on_where_it_was(
    compare: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    command = (pictures, "--weights", "bf16", "--kv-cache", "fp8", *SHORT, "--quiet", "-o")
    made: list[str] = []
    sweep, load = Sweep.run, stages.load_engine
    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "run", lambda one: (made.append("sweep"), sweep(one))[1])
        assert compare(*command, tmp_path / "whole.jsonl").code == 0
    whole = len(made)
    made.clear()

    def interrupted(one: Sweep) -> Any:
        made.append("sweep")
        if len(made) > 1:
            signal.raise_signal(number)
        return sweep(one)

    output, work = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "run", interrupted)
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # or it would end the tests
        foreground = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a script's background ignores it
        try:
            stopped = compare(*command, output)
        finally:
            signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGINT, foreground)
    assert stopped == Ran(130, "", "snugvl: interrupted; the same command with --resume continues\n")
    assert work.is_dir()
    assert "unfinished" in compare(*command, output).err
    with (work / "answers-0.jsonl").open("a") as file:
        file.write('{"number": 1, "tok')  # killed in the middle of a line
    loaded: list[object] = []
    made.clear()
    monkeypatch.setattr(Sweep, "run", lambda one: (made.append("sweep"), sweep(one))[1])
    monkeypatch.setattr(
        stages, "load_engine", lambda options, **more: (loaded.append(1), load(options, **more))[1]
    )
    assert compare(*command, output, "--resume") == Ran(0, "", "")
    assert records(output.read_text())[:-1] == records((tmp_path / "whole.jsonl").read_text())[:-1]
    assert len(loaded) <= 1  # for drafts alone: the answers were there
    assert len(made) == whole - 1  # and what the variant's own pass had found
    assert not work.exists()
    again = compare(*command[:-2], "-o", output, "--resume")
    assert (again.code, "nothing to do" in again.err) == (0, True)
    assert compare(*command, output).code == 3


def test_memory_that_others_take_is_told_and_the_work_is_kept(
    compare: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(_sweep: Sweep) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(Sweep, "run", short)
        ran = compare(pictures, "--weights", "bf16", *SHORT, "--quiet", "-o", output)
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert "CUDA out of memory. Tried to allocate 2.00 GiB; other programs may have taken" in ran.err
    assert compare(pictures, "--weights", "bf16", *SHORT, "--quiet", "-o", output, "--resume").code == 0


def test_another_comparison_is_not_continued(
    compare: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (pictures, *SHORT, "--quiet", "-o", tmp_path / "out.jsonl")

    def interrupted(_sweep: Sweep) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "run", interrupted)
    assert compare(*command, "--weights", "bf16").code == 130
    scene(5).save(pictures / "0.png")
    other = compare(*command, "--weights", "bf16", "--resume")
    assert (other.code, other.err.count("\n")) == (3, 1)
    assert "--resume continues the same comparison only" in other.err


def test_a_picture_that_cannot_be_asked_about_is_named(compare: Run, pictures: Path) -> None:
    """Too long a strip is found by the model's rules alone, after the files were read."""
    Image.new("RGB", (3000, 10)).save(pictures / "strip.png")
    ran = compare(pictures, "-q", "What?", *SHORT)
    assert ran.code == 3
    assert "strip.png: the image is 3000×10 pixels" in ran.err
    assert "3 questions" in ran.err
    one = compare(pictures / "0.png", "-q", "What?", *SHORT)
    assert ": 1 question\n" in one.err


def test_a_bad_picture_is_told_and_left_out(compare: Run, pictures: Path) -> None:
    (pictures / "0.png").write_text("no picture")
    ran = compare(pictures, "--json", "--quiet", "--weights", "bf16", *SHORT)
    assert ran.code == 7
    assert "0.png is not a picture" in ran.err
    assert ran.err.endswith("1 of 2 answers failed\n")
    assert len(records(ran.out)) == 3
    (pictures / "1.png").write_text("no picture")
    assert compare(pictures, "--weights", "bf16").code == 3
    assert compare(pictures / "1.png", "--weights", "bf16").code == 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--weights", "int3"), 3, "weights 'int3' is unknown; use auto, bf16, fp8, int8, "),
        (("--kv-cache", "q8"), 3, "kv_cache 'q8' is unknown"),
        (("--tower-weights", "int4"), 3, "tower_weights 'int4' is unknown; use bf16, int8"),
        (("--max-pixels", "1e6"), 2, "--max-pixels takes numbers between commas"),
        (("--weights", "bf16,auto"), 3, "two of the variants are the same here: fp32"),
        (("--weights", "fp8"), 3, "fp8 weights can't be made of it"),
        (("--memory", "300MiB"), 5, "MiB"),
        (("--task", "ask"), 2, "needs a question"),
        (("--object", "cat", "-q", "Where?"), 2, "--object is for --task detect, not ask"),
        (("--resume",), 2, "--resume continues a file"),
        (("--other-model", "pocket"), 3, "pocket has other tokens than"),
        (("--other-model", "no/model"), 4, "no model 'no/model' on this machine"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: tuple[str, ...], code: int, said: str, compare: Run, pictures: Path
) -> None:
    ran = compare(pictures, *SHORT, *arguments)
    assert (ran.code, said in ran.err.splitlines()[-1]) == (code, True), ran.err
    assert ran.out == ""


def test_what_has_no_pictures_is_refused(
    compare: Run, pictures: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("snugvl.cli.sources._stdin", lambda: "-")
    assert "give files" in compare("-", "--weights", "bf16").err
    assert compare(pictures, model="no/such").code == 4
    assert compare(pictures / "none.png", "--weights", "bf16").code == 3
    gguf = compare(pictures, model=gguf_samples.model(tmp_path / "m.gguf"))
    assert (gguf.code, "is a GGUF" in gguf.err) == (3, True)
    text = compare(
        pictures,
        model=text_checkpoints.write(
            tmp_path / "text", text_checkpoints.Text(text_checkpoints.LLAMA, "llama")
        ),
    )
    assert (text.code, "reads no pictures" in text.err) == (3, True)


def test_another_model_of_the_same_tokens(compare: Run, pictures: Path, tiny_other: Path) -> None:
    command = (
        pictures,
        "-q",
        "What?",
        "-q",
        "Where?",
        "--quiet",
        "--other-model",
        tiny_other,
        "--max-tokens",
        6,
    )
    ran = compare(*command, "--passes", 1, "--json")
    assert ran.code == 0, ran.err
    *answers, summary, _ = records(ran.out)
    assert all(each["variant"] == f"{tiny_other}, fp32" for each in answers)
    assert (summary["summary"]["kl"] > 0.1, summary["summary"]["incomplete"]) == (True, 4)
    shown = compare(*command, "--passes", 8).out
    wide = len(f"{tiny_other}, fp32")
    for number, question in product(range(2), ("What?", "Where?")):
        title = f"{pictures / str(number)}.png: {question}\n  {'reference':{wide}}  "
        assert title in shown
        reference, _, *_ = shown.partition(title)[2].split(f"\n  {tiny_other}, fp32  ")
        assert not reference.endswith("…")  # it is known to its end
