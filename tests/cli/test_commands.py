"""Each command on a scripted model: what it asks and what it prints."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from snugvl.cli import options, session
from snugvl.core.options import LoadOptions
from snugvl.tasks.results import Caption, Detections, Scene
from tests.cli.conftest import NOTE
from tests.command import Ran
from tests.tasks.fake import FakeBackend, prompt_of

Run = Callable[..., Ran]


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_caption_prints_the_text_and_nothing_else(snugvl: Run, pictures: Path) -> None:
    assert snugvl("caption", pictures / "a.png") == Ran(0, "A picture of 10x50.\n", NOTE)


def test_detail_and_sampling_reach_the_model(snugvl: Run, backend: FakeBackend, pictures: Path) -> None:
    args = ("--detail", "detailed", "--max-tokens", 9, "--temperature", 0.5, "--seed", 4)
    assert snugvl("caption", pictures / "a.png", *args).code == 0
    (request,) = backend.requests
    assert prompt_of(request) == "Describe this image in detail."
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.5, 4)


def test_the_model_is_loaded_as_asked(
    monkeypatch: pytest.MonkeyPatch, snugvl: Run, backend: FakeBackend, pictures: Path
) -> None:
    from snugvl.model import Model

    chosen: list[options.ModelChoice] = []
    monkeypatch.setattr(session, "load_model", lambda choice: chosen.append(choice) or Model(backend))
    monkeypatch.setenv("SNUGVL_MODEL", "from/environment")
    snugvl("caption", pictures / "a.png")
    args = ("-m", "x/y", "--device", "cuda:1", "--dtype", "float16", "--context", 512, "--max-pixels", 4096)
    args += ("--weights", "int8", "--memory", "7200MiB", "--backend", "transformers", "--trust-remote-code")
    args += ("--tower", "resident", "--embedding", "gpu")
    snugvl("scene", pictures / "a.png", *args)
    assert chosen == [
        options.ModelChoice("from/environment", load=LoadOptions("from/environment")),
        options.ModelChoice(
            "x/y",
            load=LoadOptions(
                "x/y", device="cuda:1", dtype="float16", context=512, max_pixels=4096, weights="int8",
                memory="7200MiB", backend="transformers", trust_remote_code=True, tower="resident",
                embedding="gpu",
            ),
        ),
    ]  # fmt: skip
    assert backend.closed == 2


def test_a_type_is_taken_in_short(
    monkeypatch: pytest.MonkeyPatch, snugvl: Run, pictures: Path, tmp_path: Path
) -> None:
    from snugvl.model import Model

    chosen: list[options.ModelChoice] = []
    monkeypatch.setattr(session, "load_model", lambda choice: chosen.append(choice) or Model(FakeBackend()))
    assert snugvl("caption", pictures / "a.png", "-m", "x/y", "--dtype", "fp16").code == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert snugvl("config", "set", "dtype", "fp32").code == 0
    assert snugvl("caption", pictures / "a.png", "-m", "x/y").code == 0
    assert [choice.load.dtype for choice in chosen] == ["float16", "float32"]


def test_load_model_passes_everything_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LoadOptions] = []
    monkeypatch.setattr("snugvl.loading.load_with", seen.append)
    load = LoadOptions(
        device="cpu", dtype="float32", context=1, weights="int4", memory="2GiB", tower="resident"
    )
    session.load_model(options.ModelChoice("m", load=load))
    assert seen == [replace(load, model="m")]


def test_an_engine_that_is_none_and_code_that_none_runs(snugvl: Run, pictures: Path) -> None:
    assert snugvl("caption", pictures / "a.png", "--backend", "vllm").code == 2
    ran = snugvl("ask", pictures / "a.png", "What?", "--backend", "native", "--trust-remote-code")
    assert ran.code == 2
    assert "runs no checkpoint's code" in " ".join(ran.err.replace("│", " ").split())


def test_a_question_is_last_or_an_option(snugvl: Run, pictures: Path) -> None:
    expected = Ran(0, "How many? 10x50!\n", NOTE)
    assert snugvl("ask", pictures / "a.png", "How many?") == expected
    assert snugvl("ask", "-q", "How many?", pictures / "a.png") == expected
    assert snugvl("ask", pictures / "a.png", "--question", " How many? ") == expected


def test_a_question_needs_no_quotes(snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures)
    assert snugvl("ask", "a.png", "how", "many", "are", "there").out == "how many are there 10x50!\n"
    assert snugvl("ask", "a.png", "b.jpg", "how", "many", "--together").out == "how many 10x50 and 20x50!\n"
    assert snugvl("ask", "a.png", "what", "says", "notes.txt").out == "what says notes.txt 10x50!\n"
    ran = snugvl("ask", "a.png", "missing.png", "what", "is", "it?")
    assert (ran.code, "missing.png doesn't exist" in ran.err) == (7, True)
    assert snugvl("ask", "no", "such", "picture").code == 3


def test_a_question_may_come_first(snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures)
    assert snugvl("ask", "what is this", "a.png").out == "what is this 10x50!\n"
    assert snugvl("ask", "what", "is", "this", "a.png").out == "what is this 10x50!\n"
    assert snugvl("ask", "which?", "a.png", "b.jpg", "--together").out == "which? 10x50 and 20x50!\n"
    ran = snugvl("ask", "what", "a.png", "is", "b.jpg")  # neither first nor last
    assert (ran.code, "what doesn't exist" in ran.err) == (3, True)


def test_words_beside_pictures_are_what_is_looked_for(
    snugvl: Run, backend: FakeBackend, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pictures)
    for words in (["red", "circle"], ["red circle"]):
        ran = snugvl("detect", "a.png", "b.jpg", *words, "--json")
        assert [record["params"] for record in records(ran.out)] == [{"objects": ["red circle"]}] * 2
        hint = "; several have commas between them: red, circle" if len(words) == 2 else ""
        assert f"'red circle': no such file, so this is looked for: --object 'red circle'{hint}\n" in ran.err
    ran = snugvl("detect", "a.png", "red circle, cup", "--quiet", "--json")
    assert records(ran.out)[0]["params"] == {"objects": ["red circle", "cup"]}
    assert ran.err == ""
    ran = snugvl("detect", "a.png", "red circle", "cup", "--json")
    assert records(ran.out)[0]["params"] == {"objects": ["red circle", "cup"]}
    assert "'red circle', 'cup': no such file, so this is looked for: " in ran.err
    assert "--object 'red circle' --object cup\n" in ran.err
    for words in (["red", "circle", "a.png"], ["red circle", "a.png", "b.jpg"], ["red, circle", "a.png"]):
        ran = snugvl("detect", *words, "--json")
        named = ["red", "circle"] if "," in words[0] else ["red circle"]
        assert (ran.code, records(ran.out)[0]["params"]) == (0, {"objects": named})
        many = len(words) == 3 and words[0] == "red"
        assert ("; several have commas between them: red, circle\n" in ran.err) == many
    ran = snugvl("detect", "missing.png", "cup", "a.png")
    assert (ran.code, "missing.png doesn't exist" in ran.err) == (7, True)
    ran = snugvl("detect", "a.png", "cup", "--object", "dog")
    assert (ran.code, "'cup' is not a file; name what to look for" in ran.err) == (
        2,
        True,
    )
    for mistyped in ("none.png", "below/none", "none.txt"):
        assert f"{mistyped} doesn't exist" in snugvl("detect", "a.png", mistyped).err
    ran = snugvl("detect", "none")
    assert (ran.code, "none doesn't exist" in ran.err) == (3, True)
    for command in ("caption", "scene"):
        ran = snugvl(command, "a.png", "what", "is this?")
        assert (ran.code, ran.out) == (2, "")
        assert "to ask a question: snugvl ask a.png 'what is this?'" in ran.err
        assert "Invalid value" not in ran.err


def test_names_between_commas_are_several_and_what_is_not_there_is_said(
    snugvl: Run, backend: FakeBackend, pictures: Path
) -> None:
    ran = snugvl("detect", pictures / "a.png", "--object", "cup, red circle,yellow star", "--object", "dog")
    assert [line.split()[:3] for line in ran.out.splitlines()][2:] == [
        ["yellow", "star", "not"], ["dog", "not", "found"],
    ]  # fmt: skip
    backend._script = lambda _: "[]"
    ran = snugvl("detect", pictures / "a.png", "--object", "cup", "--quiet")
    assert ran.out == "nothing found: no cup\n"
    ran = snugvl("detect", pictures / "a.png", "--object", "cup,dog", "--quiet")
    assert ran.out == "cup not found\ndog not found\n"
    assert snugvl("detect", pictures / "a.png", "--quiet").out == "nothing found\n"


def test_a_question_is_asked_of_each_image_or_of_all_together(snugvl: Run, pictures: Path) -> None:
    both = (pictures / "a.png", pictures / "b.jpg")
    assert snugvl("ask", *both, "Size?").out == f"{both[0]}: Size? 10x50!\n{both[1]}: Size? 20x50!\n"
    assert snugvl("ask", *both, "Size?", "--together").out == "Size? 10x50 and 20x50!\n"
    (record,) = records(snugvl("ask", *both, "Size?", "--together", "--json").out)
    assert record["image"] == [str(path) for path in both]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["What?"], "which image"),
        (["a.png"], "the question is missing"),
        (["a.png", "a.png"], "the question is missing"),
        (["a.png", " "], "the question is empty"),
        (["a.png", ""], "the question is empty"),
        (["a.png", "-q", ""], "the question is empty"),
        ([], "Missing argument"),
    ],
)
def test_half_a_question_is_a_usage_error(
    snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(pictures)
    ran = snugvl("ask", *args)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert "snugvl ask --help" in ran.err


def test_scene_reads_well(snugvl: Run, pictures: Path) -> None:
    lines = snugvl("scene", pictures / "a.png").out.splitlines()
    assert lines == [
        "Two cups on a table.",
        "Setting: indoors",
        "2 × cup (left; right)",
        "Text: “SALE”",
        "- one cup is left of the other",
    ]
    several = snugvl("scene", pictures / "a.png", pictures / "b.jpg").out.splitlines()
    assert several[:2] == [f"{pictures}/a.png:", "  Two cups on a table."]


def test_detect_prints_labels_and_pixels(snugvl: Run, backend: FakeBackend, pictures: Path) -> None:
    Image.new("RGB", (1000, 500)).save(pictures / "big.png")
    ran = snugvl("detect", pictures / "big.png", "--object", "cup", "--object", "Red Circle")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["Red", "Circle", "100", "100", "300", "200"],
        ["cup", "500", "250", "900", "500"],
    ]
    assert '"cup, Red Circle"' in prompt_of(backend.requests[0])


def test_json_has_its_documented_form(snugvl: Run, pictures: Path) -> None:
    (caption,) = records(snugvl("caption", pictures / "a.png", "--json").out)
    assert list(caption) == ["image", "task", "model", "params", "result", "usage", "seconds"]
    assert caption["image"] == f"{pictures}/a.png"
    assert (caption["task"], caption["model"], caption["params"]) == (
        "caption",
        "pocket",
        {"detail": "short"},
    )
    assert caption["usage"] == {"prompt_tokens": 20, "completion_tokens": 4, "image_tokens": 16}
    assert Caption.model_validate(caption["result"]).text == "A picture of 10x50."
    (scene,) = records(snugvl("scene", pictures / "a.png", "--json").out)
    assert Scene.model_validate(scene["result"]).objects[0].count == 2
    (detect,) = records(snugvl("detect", pictures / "a.png", "--json", "--object", "cup").out)
    assert detect["params"] == {"objects": ["cup"]}
    assert Detections.model_validate(detect["result"]).width == 10
    assert snugvl("detect", pictures / "a.png", "--format", "json").out.startswith('{"image"')


def test_formats_of_other_tools(snugvl: Run, pictures: Path, tmp_path: Path) -> None:
    two = (pictures / "a.png", pictures / "b.jpg")
    coco = json.loads(snugvl("detect", *two, "--format", "coco").out)
    assert (len(coco["images"]), len(coco["annotations"])) == (2, 4)
    rows = list(csv.DictReader(io.StringIO(snugvl("detect", *two, "--format", "csv").out)))
    assert [row["label"] for row in rows] == ["red circle", "cup"] * 2
    folder = tmp_path / "new" / "labels"
    assert snugvl("detect", *two, "--format", "yolo", "-o", folder) == Ran(
        0, "", f"{NOTE}snugvl: 4 boxes of 2 images in {folder}, as YOLO\n"
    )
    assert {path.name for path in folder.iterdir()} == {"classes.txt", "a.txt", "b.txt"}
    file = tmp_path / "new" / "out.csv"
    ran = snugvl("detect", *two, "--format", "csv", "-o", file)
    assert (ran.out, ran.err) == ("", f"{NOTE}snugvl: 4 boxes of 2 images in {file}, as CSV\n")
    assert snugvl("detect", *two, "--format", "csv", "-o", f"{file}2", "--quiet") == Ran(0, "", "")
    assert file.read_text().count("\n") == 5


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--format", "yolo"], 2, "name a folder with --output"),
        (["--format", "coco", "--json"], 2, "two formats"),
        (["--format", "coco", "--resume", "-o", "x"], 2, "--resume continues JSON Lines"),
        (["--format", "xml"], 2, "xml"),
        (["--resume"], 2, "name it with --output"),
        (["--object", "a,,b"], 3, "needs a name"),
        (["--object", ""], 3, "needs a name"),
        (["--draw", "a.txt"], 3, "must end in"),
        (["--draw", "a.png"], 3, "would replace the input"),
        (["--draw", "."], 3, "would replace the input"),
        (["--format", "yolo", "-o", "."], 3, "isn't an empty folder"),
        (["--format", "csv", "-o", "notes.txt"], 3, "exists"),
        (["-o", "notes.txt"], 3, "exists"),
        (["--temperature", "9"], 2, "temperature"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    snugvl: Run,
    backend: FakeBackend,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(pictures)
    before = (pictures / "a.png").read_bytes()
    ran = snugvl("detect", "a.png", *args)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert ran.err.startswith("snugvl: ")
    assert ran.err.count("\n") == 1
    assert backend.requests == []
    assert (pictures / "a.png").read_bytes() == before


def test_draw_writes_a_picture_with_the_boxes(snugvl: Run, pictures: Path, tmp_path: Path) -> None:
    before = (pictures / "e.gif").read_bytes()
    target = tmp_path / "new" / "boxes.png"
    ran = snugvl("detect", pictures / "e.gif", "--draw", target)
    assert (ran.code, ran.err) == (0, f"{NOTE}snugvl: the boxes are drawn in {target}\n")
    with Image.open(target) as picture:
        assert len(picture.convert("RGB").getcolors(100_000)) > 2
    assert (pictures / "e.gif").read_bytes() == before


def test_draw_several_into_a_folder(snugvl: Run, pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "boxes"
    ran = snugvl("detect", pictures, "--draw", folder)
    assert (ran.code, ran.err.endswith(f"snugvl: the boxes are drawn in {folder}/: 5 pictures\n")) == (
        0,
        True,
    )
    assert {path.name for path in folder.iterdir()} == {"a.png", "b.jpg", "c.PNG", "d.webp", "e.png"}
    one_file = snugvl("detect", pictures, "--draw", tmp_path / "one.png")
    assert (one_file.code, "name a folder" in one_file.err) == (3, True)
    (pictures / "below" / "a.png").write_bytes((pictures / "a.png").read_bytes())
    same = snugvl("detect", pictures, "-r", "--draw", folder)
    assert (same.code, "the same picture" in same.err) == (3, True)


def test_a_terminal_sees_the_words_as_they_come(
    snugvl: Run, backend: FakeBackend, pictures: Path, terminal: None
) -> None:
    ran = snugvl("caption", pictures / "a.png")
    assert ran.out == "A picture of 10x50.\n"
    assert ran.err == NOTE
    assert backend.streams[0].closed
    assert snugvl("ask", pictures / "a.png", "Size?", "--quiet") == Ran(0, "Size? 10x50!\n", "")
    assert snugvl("caption", pictures / "a.png", "-m", "other").err == ""


def test_several_on_a_terminal_have_coloured_names(snugvl: Run, pictures: Path, terminal: None) -> None:
    out = snugvl("caption", pictures / "a.png", pictures / "b.jpg", "--quiet").out
    assert "\x1b[" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert plain == f"{pictures}/a.png: A picture of 10x50.\n{pictures}/b.jpg: A picture of 20x50.\n"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_cut_answer_is_told(snugvl: Run, backend: FakeBackend, pictures: Path, finish: str) -> None:
    backend._finish = finish
    assert ("cut" in snugvl("caption", pictures / "a.png").err) == (finish == "length")
    assert snugvl("caption", pictures / "a.png", "--quiet").err == ""


def test_control_characters_of_a_model_never_reach_the_terminal(
    snugvl: Run, backend: FakeBackend, pictures: Path, terminal: None
) -> None:
    backend._script = lambda _: "\x1b[2J\x07evil\x9b31m \x1b]0;title\x07text"
    for images in ([pictures / "a.png"], [pictures / "a.png", pictures / "b.jpg"]):
        out = snugvl("caption", *images, "--quiet").out
        assert not re.search(r"[\x07\x9b]|\x1b[^\[]|\x1b\[2J", out)
        assert "evil" in out
