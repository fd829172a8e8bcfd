"""`snugvl chat`: a conversation, from a pipe and at a terminal."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snugvl.cli import chat as module
from tests.cli.conftest import NOTE
from tests.command import Ran
from tests.tasks.fake import FakeBackend, FakeStream, images_of, prompt_of

Run = Callable[..., Ran]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines that a person types; an exception is raised instead."""

    def type_(*lines: str | type[BaseException]) -> None:
        left: Iterator[str | type[BaseException]] = iter((*lines, EOFError))

        def line(prompt: str) -> str:
            found = next(left)
            if isinstance(found, str):
                return found
            raise found

        monkeypatch.setattr("builtins.input", line)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    return type_


def test_lines_of_a_pipe_are_questions(
    snugvl: Run, backend: FakeBackend, pictures: Path, piped: Callable[[bytes], None]
) -> None:
    piped(f"/image {pictures}/a.png\nWhat is it?\n\nAnd why?\n/clear\nAnew\n/exit\nnever".encode())
    ran = snugvl("chat", "--system", "Be short.")
    assert ran == Ran(0, "What is it? 10x50!\nAnd why? !\nAnew !\n", NOTE)
    first, second, third = backend.requests
    assert [message.role for message in second.messages] == ["system", "user", "assistant", "user"]
    assert images_of(first)[0].size == (10, 50)
    assert not images_of(second)  # it was shown before
    assert [message.role for message in third.messages] == ["system", "user"]
    assert prompt_of(third) == "Anew"


def test_pictures_of_the_command_line_and_a_saved_conversation(
    snugvl: Run, pictures: Path, tmp_path: Path, piped: Callable[[bytes], None]
) -> None:
    file = tmp_path / "talk.md"
    piped(f"Size?\n/save {file}\n".encode())
    assert snugvl("chat", pictures / "a.png", pictures / "b.jpg").out == "Size? 10x50 and 20x50!\n"
    text = file.read_text()
    assert "Size?" in text
    assert f"![a.png]({pictures}/a.png)" in text
    assert "**pocket:** Size? 10x50 and 20x50!" in text
    piped(f"Size?\n/save {file}\n".encode())
    ran = snugvl("chat", "--quiet")
    assert (ran.code, "exists" in ran.err) == (3, True)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("/image\n", "/image needs the name of a file"),
        ("/image none.png\n", "none.png doesn't exist"),
        ("/save x\n", "nothing to save"),
        ("/fly\n", "/fly is not a command"),
    ],
)
def test_a_mistake_ends_a_pipe_and_is_told_at_a_terminal(
    snugvl: Run, piped: Callable[[bytes], None], typed: Callable[..., None], lines: str, said: str
) -> None:
    piped(lines.encode() + b"Hello\n")
    ran = snugvl("chat", "--quiet")
    assert (ran.code, ran.out, ran.err.count("\n")) == (3, "", 1)
    assert said in ran.err
    piped(b"")
    typed(lines.strip(), "Hello", "/help")
    ran = snugvl("chat", "--quiet")
    assert (ran.code, ran.out) == (0, f"Hello !\n{module.HELP}\n\n")
    assert said in ran.err


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    snugvl: Run, backend: FakeBackend, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    piped: Callable[[bytes], None],
) -> None:  # fmt: skip
    words = FakeStream.__iter__

    def interrupted(stream: FakeStream) -> Iterator[object]:
        for number, delta in enumerate(words(stream)):
            if number == 1 and len(backend.requests) == 1:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(FakeStream, "__iter__", interrupted)
    backend._script = lambda _: "one two three"
    piped(b"")
    typed("Count", KeyboardInterrupt, "Again")
    ran = snugvl("chat", "--quiet")
    assert ran == Ran(0, "one\n\none two three\n\n", "")
    assert backend.streams[0].closed
    assert prompt_of(backend.requests[1]) == "Again"
    assert [message.role for message in backend.requests[1].messages] == ["user", "assistant", "user"]


def test_pocket_is_shown_no_photograph(snugvl: Run, tmp_path: Path, piped: Callable[[bytes], None]) -> None:
    from tests.cli.test_who_answers import photograph

    photograph().save(tmp_path / "tree.jpg")
    piped(b"What?\n")
    ran = snugvl("chat", tmp_path / "tree.jpg")
    assert (ran.code, "looks like a photograph" in ran.err) == (3, True)


def test_nothing_on_standard_input(snugvl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert snugvl("chat", "--quiet") == Ran(0, "", "")
