"""`snugvl chat`: a conversation in the terminal, or from a pipe, a line of which is a question each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote, unquote

from typer import Argument, Option

from snugvl.cli import options, session, sources
from snugvl.cli.records import Job
from snugvl.cli.terminal import flow, printable, say, several, show, write
from snugvl.core.folders import expanded, write_named
from snugvl.errors import InputError, RequestTooLarge, SnugvlError

if TYPE_CHECKING:
    from snugvl.client import Client
    from snugvl.core.messages import Message, Picture, Video
    from snugvl.core.sampling import SamplingParams
    from snugvl.model import Model

    Shown = tuple[str, Picture | Video]

ME: Final = "You"
SUFFIXES: Final = sources.IN_FOLDERS | sources.VIDEO_SUFFIXES
PROMPT = "> "
COMMANDS: Final = ("/image", "/clear", "/save", "/load", "/help", "/exit")
WITH_FILES: Final = ("/image", "/save", "/load")
HELP = """\
/image FILE...  show pictures or videos with the next question; so does a line of their names
/clear          begin a new conversation
/save FILE      write the conversation to a new file, as Markdown
/load FILE      go on with a conversation that was saved
/exit           leave; so does Ctrl+D. Ctrl+C ends an answer
Tab completes commands and names of files.\
"""
HELP_HANG: Final = 16
MOST_WAITING: Final = 64  # pictures; more in one question are a mistyped pattern
MOST_BYTES: Final = 16 << 20  # of a saved conversation
_WORD: Final = re.compile(r"""\s*((?:"(?:[^"\\]|\\.)*"|'[^']*'|\\.|[^\s'"\\])+)(?=\s|$)""")
_TURN: Final = re.compile(r"^\*\*([^*\n]+):\*\* ?", re.MULTILINE)
_LIKE_A_TURN: Final = re.compile(r"^\\*\*\*[^*\n]+:\*\*", re.MULTILINE)  # gets a backslash more in a file
_SHOWN: Final = re.compile(r"!\[[^\]\n]*\]\(([^)\s]+)\)\n")
_NOT_IN_A_LINK: Final = re.compile(r"""[\s()<>%\\"?#]""")


@options.grouped()
def chat(
    images: Annotated[
        list[str] | None, Argument(metavar="[IMAGE]...", help="Pictures or videos to begin with.")
    ] = None,
    system: Annotated[str | None, Option(metavar="TEXT", help="A system message for the model.")] = None,
    quiet: options.Quiet = False,
    *,
    choice: options.ModelChoice,
    generation: options.GenerationOptions,
) -> None:
    """Talk with a model about pictures, in the terminal. /help shows what can be typed beside questions."""
    choice = session.resolve(choice, None)
    talk = ChatSession(choice, generation.sampling(), system)
    talk.show(images or ())
    if not quiet:
        session.tell(choice)
    with session.load_model(choice) as model:
        _converse(talk, model, quiet=quiet)


@dataclass
class ChatSession:
    """A conversation in the terminal, and the pictures that wait for the next question."""

    choice: options.ModelChoice
    sampling: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    waiting: list[Shown] = field(default_factory=list)
    turns: list[SavedTurn] = field(default_factory=list)  # what /save writes

    def show(self, names: Sequence[str]) -> None:
        """Take pictures, or videos, for the next question: all of them or, after an error, none.

        Raises:
            SnugvlError: one can't be read, pocket can't describe it, or there are too many.
        """
        found = sources.expand(names)
        if len(self.waiting) + len(found) > MOST_WAITING:
            raise InputError(f"{len(found)} pictures are too many for one question; name fewer")
        self.waiting += self._read(found)

    def _read(self, names: Sequence[str]) -> list[Shown]:
        from snugvl.inputs.given import look

        read = session.reader(replace(self.choice, server=None))
        return [(name, look(read(Job((name,)))[0])) for name in names]

    def clear(self) -> None:
        """Forget all messages; pictures that wait for a question stay."""
        self.messages.clear()
        self.turns.clear()

    def save(self, path: Path) -> None:
        """Write the conversation to a file.

        Raises:
            InputError: there is such a file, or nothing to write.
        """
        if not self.turns:
            raise InputError("there is nothing to save yet")
        if path.exists():
            raise InputError(f"{path} exists; name a new file")
        write_named(path, "\n\n".join(turn.markdown(path) for turn in self.turns) + "\n")

    def load(self, path: Path) -> None:
        """Go on with a conversation that `save` wrote, in any folder, instead of the present one.

        Raises:
            SnugvlError: it can't be read, wasn't written by `save`, or a picture isn't there any more.
        """
        from snugvl.core.messages import Message, Text, user

        turns = [turn.moved(path) for turn in _turns(path)]
        pictures = [self._read(turn.pictures) for turn in turns]
        self.turns, self.messages = turns, []
        for turn, shown in zip(turns, pictures, strict=True):
            mine = user(*(picture for _, picture in shown), turn.text)
            self.messages.append(mine if turn.mine else Message("assistant", (Text(turn.text),)))

    def ask(self, model: Model | Client, question: str) -> None:
        """Print the answer as it comes. An interrupted answer stays in the conversation as far as it came.

        Raises:
            SnugvlError: the question couldn't be answered; the conversation is as it was before.
        """
        from snugvl.core.messages import Message, Text, user

        mine = user(*(shown for _, shown in self.waiting), question)
        before = [Message("system", (Text(self.system),))] if self.system else []
        answer, out = "", flow()
        asked = [*before, *self.messages, mine]
        with suppress(KeyboardInterrupt), model.stream_chat(asked, self.sampling) as deltas:
            for delta in deltas:
                text = delta.text if answer else delta.text.lstrip()
                answer += text
                write(out.feed(printable(text)))
        write(f"{out.end()}\n")
        self.messages += [mine, Message("assistant", (Text(answer),))]
        self.turns.append(SavedTurn(ME, question, tuple(name for name, _ in self.waiting)))
        self.turns.append(SavedTurn(self.choice.name, answer))
        self.waiting.clear()


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """A question or an answer as a saved conversation has it, `**NAME:** ![a.png](a.png)` and the text."""

    name: str
    text: str
    pictures: tuple[str, ...] = ()

    @property
    def mine(self) -> bool:
        """Whether it is a question."""
        return self.name == ME

    def markdown(self, file: Path) -> str:
        """The turn's text in `file`. Pictures beside or below it have relative paths, so that both may move
        together; others have their whole path."""
        links = []
        for name in self.pictures:
            path = Path(name).resolve()
            with suppress(ValueError):
                path = path.relative_to(file.resolve().parent)
            link = _NOT_IN_A_LINK.sub(lambda found: quote(found[0]), path.as_posix())
            links.append(f"![{path.name.translate({91: None, 93: None})}]({link})\n")
        text = _LIKE_A_TURN.sub(r"\\\g<0>", self.text)
        return f"**{self.name}:** {''.join(links)}{text}"

    def moved(self, file: Path) -> SavedTurn:
        """The turn, read from `file`, with the paths of pictures relative to the working folder."""
        return replace(self, pictures=tuple(str(file.parent / name) for name in self.pictures))


def _turns(file: Path) -> list[SavedTurn]:
    if file.is_file() and file.stat().st_size > MOST_BYTES:
        raise InputError(f"{file} has more than {MOST_BYTES >> 20} MiB; it is not a saved conversation")
    text = file.read_text(encoding="utf-8", errors="replace")
    lead, *parts = _TURN.split(text)
    names, turns = parts[::2], []
    talked = len(names) % 2 == 0 and all((name == ME) != number % 2 for number, name in enumerate(names))
    if lead.strip() or not names or not talked:
        raise InputError(f"{file} is not a conversation of snugvl chat; /load reads files that /save wrote")
    for name, said in zip(names, parts[1::2], strict=True):
        pictures, rest = [], said.rstrip("\n")
        while name == ME and (link := _SHOWN.match(rest)):
            pictures.append(unquote(link[1]))
            rest = rest[link.end() :]
        rest = re.sub(rf"^\\(?={_LIKE_A_TURN.pattern[1:]})", "", rest, flags=re.MULTILINE)
        turns.append(SavedTurn(name, rest, tuple(pictures)))
    return turns


def _converse(talk: ChatSession, model: Model | Client, *, quiet: bool) -> None:
    """Read lines until the end. At a terminal the conversation goes on after an error is shown."""
    person = sys.stdin is not None and sys.stdin.isatty()
    if person:
        _complete()
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
            if _done(talk, model, line.strip(), quiet=quiet):
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
    """The next line of input, or None at its end."""
    if not person:
        return (sys.stdin.readline() or None) if sys.stdin is not None else None
    try:
        return input(PROMPT if sys.stdout.isatty() else "")
    except EOFError:
        write("\n")
        return None


def _done(talk: ChatSession, model: Model | Client, line: str, *, quiet: bool) -> bool:
    """Answer a line's question, or run its command; returns whether that was to leave."""
    word, _, rest = line.partition(" ")
    rest, tell = rest.strip(), (lambda text: None) if quiet else say
    if word in ("/exit", "/quit", "/bye", "/q") or line.lower() in ("exit", "quit"):
        return True
    if word == "/image":
        whole = expanded(_needed(word, rest)).is_file()  # a name with blanks, without quotes
        _shown(talk, [rest] if whole else _names(rest), tell)
    elif word in ("/save", "/load"):
        name, *more = _names(_needed(word, rest))
        if more:
            raise InputError(f"{word} takes one file, not {1 + len(more)}; put a name with spaces in quotes")
        path = expanded(name)
        if word == "/save":
            talk.save(path)
            tell(f"the conversation is in {path}")
        else:
            talk.load(path)
            questions, pictures = len(talk.turns) // 2, sum(len(turn.pictures) for turn in talk.turns)
            tell(f"{path} is loaded: {several(questions, 'question')}, {several(pictures, 'picture')}")
    elif word == "/clear":
        talk.clear()
        tell("a new conversation begins")
    elif word == "/help":
        show(HELP, HELP_HANG)
    elif word.startswith("/") and not Path(_names(line)[0]).exists():
        *before, last = COMMANDS
        raise InputError(f"{word} is not a command: {', '.join(before)} and {last} are")
    elif line:
        names, question = _pictured(line)
        if names:
            _shown(talk, names, tell, "this" if question else "the next")
        if question:
            talk.ask(model, question)
    return False


def _shown(
    talk: ChatSession, names: Sequence[str], tell: Callable[[str], None], when: str = "the next"
) -> None:
    talk.show([str(expanded(name)) for name in names])
    waiting = ", ".join(name for name, _ in talk.waiting)
    what = f"{waiting} goes" if len(talk.waiting) == 1 else f"{len(talk.waiting)} pictures go"
    tell(f"{what} with {when} question" + ("" if len(talk.waiting) == 1 else f": {waiting}"))


def _pictured(line: str) -> tuple[list[str], str]:
    """The pictures that a line begins with, as one that was dragged here does, and the question behind them.
    A lone name that looks like a picture's counts even without such a file: its error is shown then."""
    names, at = [], 0
    while word := _WORD.match(line, at):
        name = "".join(_names(word[1]))
        path = expanded(name)
        if path.suffix.lower() not in SUFFIXES or not (path.is_file() or word[1] == line):
            break
        names.append(name)
        at = word.end()
    return names, line[at:].strip()


def _names(text: str) -> list[str]:
    """Names as a shell splits them; with a lone quotation mark, as in don't.png, at spaces."""
    import shlex

    try:
        return shlex.split(text) or [text]
    except ValueError:
        return text.split() or [text]


def _complete() -> None:
    """Let Tab complete commands and names of files; it also gives input() history and editing."""
    with suppress(ImportError):
        import readline

        readline.set_completer_delims("")  # a name may have blanks: the line so far is completed
        readline.set_completer(lambda line, number: dict(enumerate(completions(line))).get(number))
        editline = getattr(readline, "backend", "readline") == "editline"
        readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")


def completions(line: str) -> list[str]:
    """Completions of `line`: a command, or a command with one more file name."""

    head = line.partition(" ")[0]
    if line.startswith("/") and " " not in line:
        found = [f"{command} " if command in WITH_FILES else command for command in COMMANDS]
        if matching := [command for command in found if command.startswith(line)]:
            return matching
    command = f"{head} " if head in WITH_FILES and line != head else ""
    words = list(_WORD.finditer(line, len(command)))
    begun = words[-1] if words and words[-1].end() == len(line) else None
    before = line[: begun.start(1)] if begun else line
    name = "".join(_names(begun[1])) if begun else ""
    folder, _, start = name.rpartition("/")
    where = expanded(f"{folder}/" if folder or name.startswith("/") else ".")
    if not command and not start:  # a question: no list of files after each word
        return []
    with suppress(OSError):
        paths = [path for path in where.iterdir() if path.name.startswith(start)]
        if not start.startswith("."):
            paths = [path for path in paths if not path.name.startswith(".")]
        lead = name[: len(name) - len(start)]
        return sorted(
            before + _escaped(lead + path.name) + ("/" if path.is_dir() else " ") for path in paths
            if path.is_dir() or command in ("/save ", "/load ") or path.suffix.lower() in SUFFIXES
        )  # fmt: skip
    return []


def _escaped(name: str) -> str:
    """A file name as it is typed in a line, with `~` left as it is."""
    return re.sub(r"""([\s'"\\])""", r"\\\1", name)


def _needed(word: str, rest: str) -> str:
    if not rest:
        raise InputError(f"{word} needs the name of a file: {word} FILE")
    return rest
