"""`snugvl chat`: a conversation, from a pipe and at a terminal."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snugvl.cli import chat as module
from tests.cli.conftest import NOTE
from tests.command import Ran
from tests.server.fake import FakeStream
from tests.tasks.fake import FakeBackend, images_of, prompt_of

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
    assert (ran.code, ran.out) == (0, "What is it? 10x50!\nAnd why? !\nAnew !\n")
    assert ran.err == (
        f"{NOTE}snugvl: {pictures}/a.png goes with the next question\nsnugvl: a new conversation begins\n"
    )
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
    assert "![a.png](pictures/a.png)" in text  # they may move together
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


def test_several_names_and_a_line_of_names_are_pictures(
    snugvl: Run, backend: FakeBackend, pictures: Path, piped: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(pictures)
    (pictures / "a.png").rename("a b.png")
    lines = (
        "/image 'a b.png' b.jpg", "Both?", "/image a\\ b.png c.PNG", "Again?", "\"a b.png\"", "Dragged?",
        "b.jpg c.PNG What is it?", "What's in b.jpg and don't you know?", "/image *.jpg", "Pattern?",
        f"{pictures}/b.jpg",
    )  # fmt: skip
    piped("\n".join(lines).encode())
    ran = snugvl("chat")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == [
        "Both? 10x50 and 20x50!", "Again? 10x50 and 30x50!", "Dragged? 10x50!",
        "What is it? 20x50 and 30x50!",
        "What's in b.jpg and don't you know? !", "Pattern? 20x50!",
    ]  # fmt: skip
    assert "snugvl: 2 pictures go with the next question: a b.png, b.jpg\n" in ran.err
    assert "snugvl: 2 pictures go with this question: b.jpg, c.PNG\n" in ran.err
    assert ran.err.endswith(f"snugvl: {pictures}/b.jpg goes with the next question\n")
    piped(b"nothing.png\nHello\n")
    ran = snugvl("chat", "--quiet")
    assert (ran.code, ran.out, "nothing.png doesn't exist" in ran.err) == (3, "", True)


def test_of_several_pictures_one_of_which_is_wrong_none_is_taken(
    snugvl: Run, pictures: Path, typed: Callable[..., None], piped: Callable[[bytes], None]
) -> None:
    piped(b"")
    typed(f"/image {pictures}/a.png none.png", "Hello", f"/image {pictures}/notes.txt", "So?")
    ran = snugvl("chat")
    assert (ran.code, ran.out) == (0, "Hello !\nSo? !\n\n")
    assert "none.png doesn't exist" in ran.err
    assert "notes.txt" in ran.err


def test_a_saved_conversation_goes_on_from_another_folder(
    snugvl: Run, backend: FakeBackend, pictures: Path, tmp_path: Path, piped: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    elsewhere = tmp_path / "elsewhere (2) #1"
    elsewhere.mkdir()
    monkeypatch.chdir(pictures)
    (pictures / "b.jpg").rename("100% ünder?.jpg")
    backend._script = lambda request: "**You:** is what I'd say.\n\n\\**pocket:** or not"
    lines = (
        "/image a.png '100% ünder?.jpg'",
        "Which?",
        "And **You:** then",
        "/save '../elsewhere (2) #1/talk.md'",
    )
    piped("\n".join(lines).encode())
    ran = snugvl("chat")
    assert ran.code == 0
    assert ran.err.splitlines()[-1] == "snugvl: the conversation is in ../elsewhere (2) #1/talk.md"
    asked = backend.requests[-1].messages
    saved = (elsewhere / "talk.md").read_text()
    monkeypatch.chdir(elsewhere)
    piped(b"/load talk.md\nMore\n/save again.md\n")
    ran = snugvl("chat")
    assert "snugvl: talk.md is loaded: 2 questions, 2 pictures\n" in ran.err
    told = backend.requests[-1].messages[:-1]
    assert [message.role for message in told] == ["user", "assistant", "user", "assistant"]
    assert [part.image.size for part in told[0].content[:2]] == [(10, 50), (20, 50)]  # type: ignore[union-attr]
    assert told[1:3] == asked[1:3]
    assert (elsewhere / "again.md").read_text().startswith(saved.rstrip())
    (pictures / "a.png").unlink()
    piped(b"/load talk.md\n")
    ran = snugvl("chat", "--quiet")
    assert (ran.code, "a.png doesn't exist" in ran.err) == (3, True)


@pytest.mark.parametrize("text", ["", "Hello", "**You:** one\n\n**You:** two\n", "**pocket:** one\n"])
def test_what_is_no_saved_conversation_is_not_loaded(
    snugvl: Run, tmp_path: Path, piped: Callable[[bytes], None], text: str
) -> None:
    (tmp_path / "talk.md").write_text(text)
    piped(f"/load {tmp_path}/talk.md\n".encode())
    ran = snugvl("chat", "--quiet")
    assert (ran.code, "/load reads files that /save wrote" in ran.err) == (3, True)


def test_tab_completes_commands_and_files(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures)
    (pictures / "a b.png").touch()
    assert module.completions("/i") == ["/image "]
    assert module.completions("/") == ["/image ", "/clear", "/save ", "/load ", "/help", "/exit"]
    assert module.completions("/image a") == ["/image a.png ", "/image a\\ b.png "]
    assert module.completions("/image a.png a\\ ") == ["/image a.png a\\ b.png "]
    assert module.completions("/image bel") == ["/image below/"]
    assert module.completions("/image below/") == ["/image below/f.png "]
    assert module.completions("/save n") == ["/save notes.txt "]
    assert module.completions("/image n") == []
    assert module.completions("b.") == ["b.jpg "]
    assert module.completions("What is ") == []
    monkeypatch.setenv("HOME", str(pictures.parent))
    assert module.completions("/image ~/pictures/b.") == ["/image ~/pictures/b.jpg "]


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye", "exit", "Quit"])
def test_words_that_end_a_conversation(
    snugvl: Run, backend: FakeBackend, piped: Callable[[bytes], None], word: str
) -> None:
    piped(f"{word}\nnever".encode())
    assert (snugvl("chat").code, backend.requests) == (0, [])


def test_a_name_with_blanks_needs_no_quotes(
    snugvl: Run, backend: FakeBackend, pictures: Path, piped: Callable[[bytes], None]
) -> None:
    (pictures / "a.png").rename(pictures / "IMG 0002.png")
    piped(f"/image {pictures}/IMG 0002.png\nWhat?\n".encode())
    assert snugvl("chat").code == 0
    assert images_of(backend.requests[0])[0].size == (10, 50)
