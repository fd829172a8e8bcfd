"""Settings of a child server, started or attached to: those that all engines have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from snugvl.checkpoint.locate import POCKET, near
from snugvl.core.ledger import LedgerRow, RunningPlan
from snugvl.core.messages import ToolForm, user
from snugvl.diagnose.facts import Card
from snugvl.diagnose.result import Change, Diagnosis
from snugvl.errors import RequestError, SnugvlError
from snugvl.inputs.chat import ChatTemplate
from snugvl.inputs.reasoning import PLAIN, VARIABLE, ThinkingDefault, opened

Words = tuple[str, ...]


def refuse_flags(arguments: Words, ours: Sequence[str], engine: str) -> None:
    """Refuse flags that are ours to set.

    Raises:
        RequestError: names them.
    """
    taken = [word for word in arguments if word.partition("=")[0].replace("_", "-") in ours]
    if taken:
        raise RequestError(
            f"{', '.join(taken)}: snugvl decides where its {engine} listens and what it is called; leave "
            "it out",
            field="arguments",
        )


def flag_value(arguments: Words, flag: str) -> str | None:
    """The value of a flag; the last one counts, as the engines have it."""
    found = None
    for index, word in enumerate(arguments):
        name, equals, joined = word.partition("=")
        if name == flag:
            found = joined if equals else next(iter(arguments[index + 1 : index + 2]), None)
    return found


def changed_flags(arguments: Words, changes: Sequence[Change]) -> Words:
    """The arguments with flags changed, added and removed. Those of variables aren't flags."""
    for change in changes:
        if not change.flag.startswith("-"):
            continue
        arguments = _without(arguments, change.flag)
        if change.new is not None:
            several = change.flag == "--cudagraph-capture-sizes"  # of vLLM
            words = change.new.split() if several else [change.new] if change.new else []
            arguments = (*arguments, change.flag, *words)
    return arguments


def changed_variables(changes: Sequence[Change]) -> tuple[tuple[str, str], ...]:
    """The environment variables among the changes."""
    return tuple((c.flag, c.new) for c in changes if not c.flag.startswith("-") and c.new is not None)


def _without(arguments: Words, flag: str) -> Words:
    kept: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit()):
            dropping = word.partition("=")[0] == flag
        if not dropping:
            kept.append(word)
    return tuple(kept)


STARTUP_S = 1800.0  # a first start may compile kernels for minutes
IDLE_S = 30.0  # a start of vLLM 0.32 on a CPU never went a second without work

# From what a log says and the choice that led to it: another choice, or None where none would help.
Replan = Callable[[Diagnosis, Any], Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """Known facts of the checkpoint, from any source; all may stay unknown.

    Attributes:
        images: whether the model sees; None: unknown, then pictures are sent, to be refused by the engine.
        min_pixels, max_pixels: pixels of an image as the model reads it; 0 for unknown or no images.
        pixel_factor: sides of an image as the model reads it are multiples of this; 0 for unknown.
        device, dtype, weights, architecture, parameters, tools, tool_form, exact_forms: see `Capabilities`.
        calls: whether the chat template shows calls of tools and their answers.
        image_token: id of the placeholder of pictures in a prompt; -1 for unknown.
        control_tokens: strings that no text of a request may contain; longest first.
        reasoning: whether answers begin inside the reasoning; None where no template says that it thinks.
        reasoning_asked: the same of a request that asks the template to think.
        thinking: whether it thinks where a request doesn't say.
        gpu_uuids: NVML's names of the GPUs it runs on, for what is free there now.
        card: memory of the first of them as the plan saw it, for the diagnosis of a start that fails.
        plan: the plan that the engine was started with; None without one.
    """

    images: bool | None = None
    min_pixels: int = 0
    max_pixels: int = 0
    pixel_factor: int = 0
    device: str = ""
    dtype: str = ""
    weights: str = ""
    architecture: str = ""
    parameters: int = 0
    tools: bool = True
    tool_form: ToolForm = field(default_factory=ToolForm)
    exact_forms: bool = True
    calls: bool = True
    image_token: int = -1
    control_tokens: tuple[str, ...] = ()
    reasoning: bool | None = None
    reasoning_asked: bool | None = None
    thinking: ThinkingDefault = PLAIN
    gpu_uuids: tuple[str, ...] = ()
    card: Card | None = None
    plan: RunningPlan | None = None


def with_template(facts: Facts, template: ChatTemplate) -> Facts:
    """The facts with those of the checkpoint's chat template."""
    return replace(
        facts,
        tools=template.shows_tools,
        calls=template.shows_calls,
        tool_form=template.tool_form,
        control_tokens=(*facts.control_tokens, *template.answer_marks),
        reasoning=_reasoning(template, {}),
        reasoning_asked=_reasoning(template, {VARIABLE: True}),
    )


def _reasoning(template: ChatTemplate, told: dict[str, bool]) -> bool | None:
    """Whether answers begin inside the model's reasoning, by its template on a simple question."""
    try:
        return opened(template.render([user("?")], extra=told)) if template.thinks else None
    except SnugvlError:
        return None


@dataclass(frozen=True, slots=True)
class ChildChoice:
    """A server to launch, or with `attach` one that runs already.

    Attributes:
        model: a folder, a file or a Hub id, as the engine takes it. With `attach`: the name to ask for;
            empty for the first one that is served there.
        arguments: flags behind the model, as the plan makes them. Address and key are added here.
        command: the words of the engine's command, such as ("vllm",); None: it is looked for.
        environment: variables for the child beside our own, such as CUDA_VISIBLE_DEVICES.
        attach: base URL of a server that runs ("http://127.0.0.1:8001"); nothing is started or ended then.
        api_key: API key of that server.
        facts: facts of the checkpoint and the device; None: those of the checkpoint's files.
        planned: the plan's rows of the ledger.
        retry: whether a start that failed is tried once more with changed flags.
        replan: makes the choice to retry with; None: this one, with the changes that `diagnose` computes.
        startup_s: seconds after which a start is ended.
        idle_s: seconds without any activity after which a start is ended: no line of its log, no processor
            time, nothing read or written, no more memory of a GPU.
    """

    model: str = ""
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    attach: str | None = None
    api_key: str | None = field(default=None, repr=False)
    facts: Facts | None = None
    planned: tuple[LedgerRow, ...] = ()
    retry: bool = True
    replan: Replan | None = None
    startup_s: float = STARTUP_S
    idle_s: float = IDLE_S

    @property
    def card(self) -> Card | None:
        """The GPU as the plan saw it, for a diagnosis; None without a plan."""
        return self.facts.card if self.facts is not None else None

    @property
    def name(self) -> str:
        """The model's name for people and in requests."""
        return self.model or f"the model at {self.attach}"

    def changed(self, changes: Sequence[Change]) -> Self:
        """This choice with the flags and variables changed that a diagnosis names."""
        return replace(
            self,
            arguments=changed_flags(self.arguments, changes),
            environment=self.environment + changed_variables(changes),
        )

    @property
    def folder(self) -> str:
        """The model's path or Hub id for the engine: pocket becomes its folder."""
        return str(near(POCKET)) if self.model == POCKET else self.model

    def check(self, engine: str, chosen: bool) -> None:
        """Refuse settings that contradict each other.

        `chosen`: whether a setting of this engine alone was given, such as vLLM's sleeping.

        Raises:
            RequestError: names the settings.
        """
        if self.attach is None and not self.model:
            raise RequestError(f"{engine} needs the name of the model to serve", field="model")
        if self.attach is not None and (self.command or self.arguments or chosen):
            raise RequestError(
                f"--attach can't be combined with a command, flags or sleeping: a {engine} that runs already "
                "keeps its own; leave one of them out",
                field="attach",
            )
        if self.attach is not None and not self.attach.startswith(("http://", "https://")):
            raise RequestError(
                f"--attach takes a {engine} server's URL, such as http://127.0.0.1:8001, not {self.attach!r}",
                field="attach",
            )
