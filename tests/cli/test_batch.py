"""Many images: order, one bad file, an output file, resuming, folders, globs, standard input."""

import base64
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from snugvl.cli import batch
from tests.cli.conftest import NOTE
from tests.command import Ran
from tests.patience import PATIENCE_S
from tests.tasks.fake import FakeBackend, images_of, slowly

Run = Callable[..., Ran]


def names(text: str) -> list[str]:
    return [Path(json.loads(line)["image"]).name for line in text.splitlines()]


def test_a_folder_gives_its_pictures_by_name(snugvl: Run, pictures: Path) -> None:
    ran = snugvl("caption", pictures, "--json")
    assert (ran.code, names(ran.out)) == (0, ["a.png", "b.jpg", "c.PNG", "d.webp", "e.gif"])
    deep = names(snugvl("caption", pictures, "--recursive", "--json").out)
    assert deep == ["a.png", "b.jpg", "f.png", "c.PNG", "d.webp", "e.gif"]


def test_a_name_of_two_lines_is_one_line_of_the_text(snugvl: Run, pictures: Path) -> None:
    (pictures / "a.png").rename(pictures / "a\nb.png")
    assert snugvl("caption", pictures / "a\nb.png", pictures / "b.jpg").out.startswith(
        f"{pictures}/a b.png: A picture of 10x50.\n{pictures}/b.jpg: "
    )


def test_folders_that_are_gone_meanwhile_are_passed_over(
    snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of processes below /proc, where somebody looks for pictures in all of the disk."""
    scan = os.scandir

    def gone(place: str | Path = ".") -> object:
        if Path(place).name == "gone":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", gone)
    (pictures / "gone").mkdir()
    place = pictures.parent / "place"
    place.mkdir()
    (place / "gone").mkdir()
    assert snugvl("caption", pictures, "--recursive").code == 0
    empty = snugvl("caption", place)
    assert (empty.code, "none of its files ends in" in empty.err) == (3, True)


def test_a_glob_is_expanded_and_a_name_that_looks_like_one_is_a_file(snugvl: Run, pictures: Path) -> None:
    assert names(snugvl("caption", f"{pictures}/*.[pj]*", "--json").out) == ["a.png", "b.jpg"]
    assert len(names(snugvl("caption", f"{pictures}/**/*.png", "--json").out)) == 2
    (pictures / "a.png").rename(pictures / "x[1].png")
    assert snugvl("caption", pictures / "x[1].png").out == "A picture of 10x50.\n"


def test_an_image_named_twice_is_done_once(snugvl: Run, pictures: Path) -> None:
    assert len(names(snugvl("caption", pictures, pictures / "a.png", "--json").out)) == 5


def test_a_data_url_is_an_image_and_a_name_may_be_too_long(snugvl: Run, pictures: Path) -> None:
    text = base64.b64encode((pictures / "a.png").read_bytes() + bytes(4096)).decode()
    assert snugvl("caption", f"data:image/png;base64,{text}").out == "A picture of 10x50.\n"
    ran = snugvl("caption", "x" * 300 + ".png")
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert "can't be read: File name too long" in ran.err


def test_standard_input_is_an_image(snugvl: Run, pictures: Path, piped: Callable[[bytes], None]) -> None:
    piped((pictures / "a.png").read_bytes())
    assert snugvl("caption", "-").out == "A picture of 10x50.\n"
    piped((pictures / "a.png").read_bytes())
    assert names(snugvl("ask", "-", pictures / "b.jpg", "Size?", "--json").out) == ["-", "b.jpg"]
    piped(b"text")
    ran = snugvl("caption", "-")
    assert (ran.code, ran.err.count("\n")) == (3, 1)


def test_output_keeps_the_order_whatever_finishes_first(
    snugvl: Run, backend: FakeBackend, pictures: Path
) -> None:
    backend._script = lambda request: slowly("x", 0.15 if images_of(request)[0].width == 10 else 0)
    assert names(snugvl("caption", pictures, "--json").out) == ["a.png", "b.jpg", "c.PNG", "d.webp", "e.gif"]


def test_images_are_asked_about_together_but_not_without_bound(
    snugvl: Run, backend: FakeBackend, tmp_path: Path
) -> None:
    for number in range(30):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number:02}.png")
    lock, running, most = threading.Lock(), 0, 0

    def script(_: object) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        slowly("", 0.02)
        with lock:
            running -= 1
        return "x"

    backend._script = script
    assert snugvl("caption", tmp_path, "--json").code == 0
    assert 2 <= most <= batch.IN_FLIGHT


def test_a_bad_file_is_reported_and_skipped(snugvl: Run, pictures: Path) -> None:
    (pictures / "b.jpg").write_text("not a picture")
    ran = snugvl("caption", pictures)
    assert ran.code == 7
    assert ran.out.count("\n") == 4
    note, bad, summary = ran.err.splitlines(keepends=True)
    assert note == NOTE
    assert "b.jpg" in bad
    assert summary == "snugvl: 1 of 5 images failed\n"
    lines = [json.loads(line) for line in snugvl("caption", pictures, "--json").out.splitlines()]
    assert [("error" in line, "result" in line) for line in lines] == [(n == 1, n != 1) for n in range(5)]
    assert lines[1]["error"]["type"] == "ImageError"
    assert set(lines[1]["error"]) == {"type", "message"}


def test_a_bug_on_one_image_does_not_end_the_batch(snugvl: Run, backend: FakeBackend, pictures: Path) -> None:
    backend._script = lambda request: KeyError("k") if images_of(request)[0].width == 20 else "x"
    ran = snugvl("caption", pictures)
    assert (ran.code, ran.out.count("\n")) == (7, 4)
    assert "b.jpg: unexpected KeyError" in ran.err


def test_output_goes_to_a_new_file(snugvl: Run, pictures: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "out.jsonl"
    assert snugvl("caption", pictures, "-o", file) == Ran(0, "", f"{NOTE}snugvl: 5 results in {file}\n")
    assert len(names(file.read_text())) == 5
    again = snugvl("caption", pictures, "-o", file)
    assert (again.code, "--resume" in again.err) == (3, True)


def test_resume_does_what_is_missing(
    snugvl: Run, backend: FakeBackend, pictures: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    good = (pictures / "b.jpg").read_bytes()
    (pictures / "b.jpg").write_text("not a picture")
    assert snugvl("caption", pictures, "-o", file).code == 7
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][: len(lines[3]) // 2])  # killed in the middle of a line
    (pictures / "b.jpg").write_bytes(good)
    backend.requests.clear()
    assert snugvl("caption", pictures, "-o", file, "--resume") == Ran(
        0, "", f"{NOTE}snugvl: 3 new results in {file}\n"
    )
    assert sorted(names(file.read_text())) == ["a.png", "b.jpg", "c.PNG", "d.webp", "e.gif"]
    assert "error" not in file.read_text()
    assert len(backend.requests) == 3
    ran = snugvl("caption", pictures, "-o", file, "--resume")
    assert (ran.code, "nothing to do" in ran.err) == (0, True)
    assert len(backend.requests) == 3


@pytest.mark.parametrize("torn", ["", "{", '{"image"', '{"image": "é'.encode()[:-1].decode(errors="replace")])
def test_resume_starts_from_nothing_or_a_torn_first_line(
    snugvl: Run, pictures: Path, tmp_path: Path, torn: str
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(torn)
    assert snugvl("caption", pictures, "-o", file, "--resume").code == 0
    assert len(names(file.read_text())) == 5


def test_resume_without_a_file_begins_one(snugvl: Run, pictures: Path, tmp_path: Path) -> None:
    assert snugvl("caption", pictures, "-o", tmp_path / "new" / "out.jsonl", "--resume").code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ask", "-q", "How many cats?"], "question"),
        (["ask", "-q", "How many?", "-m", "other/model"], "model"),
        (["ask", "-q", "How many?", "--max-tokens", "5"], "params"),
        (["caption"], "task"),
    ],
)
def test_resume_refuses_other_work(
    snugvl: Run, backend: FakeBackend, pictures: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    file = tmp_path / "out.jsonl"
    assert snugvl("ask", pictures, "How many?", "-o", file).code == 0
    before, done = file.read_text(), len(backend.requests)
    ran = snugvl(*args, pictures, "-o", file, "--resume")
    assert (ran.code, ran.err.count("\n")) == (3, 1)
    assert message in ran.err
    assert "the same work only" in ran.err
    assert (file.read_text(), len(backend.requests)) == (before, done)


@pytest.mark.parametrize("content", ["hello\nworld\n", "[1]\n[2]\n", '{"image": 1}\n{"image": 2}\n'])
def test_resume_refuses_a_file_that_is_not_ours(
    snugvl: Run, pictures: Path, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(content)
    ran = snugvl("caption", pictures, "-o", file, "--resume")
    assert (ran.code, "is not a record of snugvl" in ran.err) == (3, True)
    assert file.read_text() == content


def test_resume_refuses_standard_input(
    snugvl: Run, pictures: Path, tmp_path: Path, piped: Callable[[bytes], None]
) -> None:
    piped((pictures / "a.png").read_bytes())
    ran = snugvl("caption", "-", pictures, "-o", tmp_path / "out.jsonl", "--resume")
    assert (ran.code, "give files" in ran.err) == (3, True)


def test_a_file_name_that_is_no_text(snugvl: Run, pictures: Path, tmp_path: Path) -> None:
    odd = pictures / "odd\udcff.png"
    (pictures / "a.png").rename(odd)
    file = tmp_path / "out.jsonl"
    assert snugvl("caption", pictures, "-o", file).code == 0
    assert snugvl("caption", pictures, "-o", file, "--resume").err.startswith("snugvl: nothing to do")
    assert snugvl("caption", pictures).code == 0


def test_a_person_sees_a_bar_and_a_log_does_not(
    snugvl: Run, pictures: Path, tmp_path: Path, terminal: None
) -> None:
    (pictures / "b.jpg").write_text("not a picture")
    ran = snugvl("caption", pictures, "-o", tmp_path / "1.jsonl", "-m", "x")
    assert "5/5" in ran.err
    assert "b.jpg" in ran.err
    assert "5/5" not in snugvl("caption", pictures, "-o", tmp_path / "2.jsonl", "--quiet").err
    assert "5/5" not in snugvl("caption", pictures).err  # the results on the terminal are the progress


def test_ctrl_c_that_does_not_wake_the_main_thread_is_seen_all_the_same(
    snugvl: Run, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it comes in the instant before the main thread waits: here another thread takes the signal."""
    over = threading.Event()
    ended = []

    def endless(*_: object) -> None:
        time.sleep(0.2)  # the main thread waits by now; where it doesn't yet, nothing is proven
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.append(over.wait(PATIENCE_S / 20))

    monkeypatch.setattr(batch, "_attempt", endless)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = snugvl("caption", pictures / "a.png", pictures / "b.jpg")
        assert not ended
    finally:
        over.set()
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.out) == (130, "")
    assert "interrupted after 0 of 2 images" in ran.err
