"""`snugvl chat`: a conversation in the terminal, or from a pipe, a line of which is a question each."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snugvl.cli import options, session
from snugvl.cli.records import check_new
from snugvl.cli.stderr import printable, say
from snugvl.cli.stdout import write
from snugvl.cli.task import Job
from snugvl.errors import InputError, RequestTooLarge, SnugvlError

if TYPE_CHECKING:
    from PIL.Image import Image

    from snugvl.client import Client
    from snugvl.core.messages import Message, Video
    from snugvl.core.sampling import SamplingParams
    from snugvl.model import Model

PROMPT = "> "
HELP = """\
/image FILE   show a picture or a video with the next question; again for more
/clear        begin a new conversation
/save FILE    write the conversation to a new file, as Markdown
/exit         leave; so does Ctrl+D. Ctrl+C ends an answer\
"""


@options.grouped()
def chat(
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="[IMAGE]...", help="Pictures or videos to begin with."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="What the model is told beforehand.")
    ] = None,
    quiet: options.Quiet = False,
    *,
    choice: options.ModelChoice,
    generation: options.Generation,
) -> None:
    """Talk with a model about pictures, in the terminal. /help shows what can be typed beside questions."""
    choice = session.resolve(choice, None)
    talk = Conversation(choice, generation.sampling(), system)
    for name in images or ():
        talk.show(name)
    if not quiet:
        session.tell(choice)
    with session.load_model(choice) as model:
        _converse(talk, model, quiet=quiet)


@dataclass
class Conversation:
    """What was said, and the pictures that wait for the next question."""

    choice: options.ModelChoice
    sampling: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    waiting: list[tuple[str, Image | Video]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # what /save writes

    def show(self, name: str) -> None:
        """Take a picture, or a video, for the next question.

        Raises:
            ImageError: it can't be read, or pocket can't describe it.
        """
        from snugvl.model import see

        read = session.reader(replace(self.choice, server=None))
        self.waiting.append((name, see(read(Job((name,)))[0])))

    def clear(self) -> None:
        """Forget everything but the pictures that wait."""
        self.messages.clear()
        self.shown.clear()

    def save(self, path: Path) -> None:
        """Write what was said.

        Raises:
            InputError: there is such a file, or nothing to write.
        """
        if not self.shown:
            raise InputError("there is nothing to save yet")
        check_new(path)
        path.write_text("\n\n".join(self.shown) + "\n", encoding="utf-8")

    def ask(self, model: Model | Client, question: str) -> None:
        """Print the answer as it comes. What was interrupted stays in the conversation as far as it came.

        Raises:
            SnugvlError: the question couldn't be answered; the conversation is as it was before.
        """
        from snugvl.core.messages import Message, Text, user

        mine = user(*(shown for _, shown in self.waiting), question)
        before = [Message("system", (Text(self.system),))] if self.system else []
        answer = ""
        asked = [*before, *self.messages, mine]
        with suppress(KeyboardInterrupt), model.stream_chat(asked, self.sampling) as deltas:
            for delta in deltas:
                text = delta.text if answer else delta.text.lstrip()
                answer += text
                write(printable(text))
        write("\n")
        self.messages += [mine, Message("assistant", (Text(answer),))]
        names = "".join(f"![{Path(name).name}]({name})\n" for name, _ in self.waiting)
        self.shown += [f"**You:** {names}{question}", f"**{self.choice.name}:** {answer}"]
        self.waiting.clear()


def _converse(talk: Conversation, model: Model | Client, *, quiet: bool) -> None:
    """Read lines until the end. At a terminal an error is told and the conversation goes on."""
    person = sys.stdin is not None and sys.stdin.isatty()
    if person:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() has history and editing with it
        if not quiet:
            say("ask, or type /help; Ctrl+D leaves")
    while True:
        try:
            line = _line(person)
        except KeyboardInterrupt:
            write("\n")
            continue
        if line is None:
            return
        try:
            if _done(talk, model, line.strip()):
                return
        except SnugvlError as error:
            if not person:
                raise
            clear = "; /clear begins a new conversation" if isinstance(error, RequestTooLarge) else ""
            say(f"{error}{clear}")
        except OSError as error:
            if not person:
                raise
            say(f"{error.filename or ''}: {error.strerror or error}")


def _line(person: bool) -> str | None:
    """The next line, or None at the end."""
    if not person:
        return (sys.stdin.readline() or None) if sys.stdin is not None else None
    try:
        return input(PROMPT if sys.stdout.isatty() else "")
    except EOFError:
        write("\n")
        return None


def _done(talk: Conversation, model: Model | Client, line: str) -> bool:
    """Do what a line says; whether that is to leave."""
    word, _, rest = line.partition(" ")
    rest = rest.strip()
    if word == "/exit":
        return True
    if word == "/image":
        talk.show(_needed(word, rest))
    elif word == "/save":
        talk.save(Path(_needed(word, rest)).expanduser())
        say(f"saved as {rest}")
    elif word == "/clear":
        talk.clear()
    elif word == "/help":
        write(HELP + "\n")
    elif word.startswith("/") and not Path(word).exists():
        raise InputError(f"{word} is not a command: /image, /clear, /save, /exit and /help are")
    elif line:
        talk.ask(model, line)
    return False


def _needed(word: str, rest: str) -> str:
    if not rest:
        raise InputError(f"{word} needs the name of a file: {word} FILE")
    return rest
