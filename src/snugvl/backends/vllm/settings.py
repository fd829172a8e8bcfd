"""What a vLLM server is started with, or which one is used: all that `VllmEngine` has to know, as a value."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from snugvl.checkpoint.locate import POCKET, near
from snugvl.core.ledger import LedgerRow
from snugvl.core.messages import ToolForm
from snugvl.diagnose.facts import Card
from snugvl.diagnose.result import Diagnosis
from snugvl.errors import RequestError
from snugvl.inputs.reasoning import PLAIN, Thinking

STARTUP_S = 1800.0  # a first start may compile kernels for minutes
IDLE_S = 30.0  # a start of vLLM 0.32 on a CPU never went a second without work

# From what a log says and the choice that led to it: another choice, or None where none would help.
Replan = Callable[[Diagnosis, "VllmChoice"], "VllmChoice | None"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the checkpoint. vLLM's API tells none of it; all of it may stay unknown.

    Attributes:
        images: whether the model sees; None: unknown, then pictures are sent and vLLM refuses what it can't.
        min_pixels, max_pixels: of an image as the model reads it; 0 for unknown or no images.
        pixel_factor: sides of an image as the model reads it are multiples of this; 0 for unknown.
        device, dtype, weights, architecture, parameters, tools, tool_form: see `Capabilities`.
        calls: whether the chat template shows calls of tools and their answers.
        image_token: id of the placeholder of pictures in a prompt; -1 for unknown.
        control_tokens: strings that no text of a request may contain; longest first.
        reasoning: whether answers begin inside the reasoning; None where no template says that it thinks.
        reasoning_asked: the same of a request that asks the template to think.
        thinking: whether it thinks where a request doesn't say.
        gpu_uuids: NVML's names of the GPUs it runs on, for what is free there now.
        card: memory of the first of them as the plan saw it, for the diagnosis of a start that fails.
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
    calls: bool = True
    image_token: int = -1
    control_tokens: tuple[str, ...] = ()
    reasoning: bool | None = None
    reasoning_asked: bool | None = None
    thinking: Thinking = PLAIN
    gpu_uuids: tuple[str, ...] = ()
    card: Card | None = None


@dataclass(frozen=True, slots=True)
class VllmChoice:
    """A vLLM to launch, or with `attach` one that runs already.

    Attributes:
        model: a folder or a Hub id, as `vllm serve` takes it. With `attach`: the name to ask for; empty for
            the first one that is served there.
        arguments: flags of `vllm serve` behind the model, as `planner.vllm_flags.vllm_flags` makes them.
            Address, defaults of sampling and structured outputs are added here.
        command: the words that stand for `vllm` ("--vllm-command"); None: it is looked for.
        environment: variables for the child beside our own, such as CUDA_VISIBLE_DEVICES.
        attach: base URL of a server that runs ("http://127.0.0.1:8001"); nothing is started or ended then.
        api_key: of that server.
        facts: of the checkpoint and the device; None: what the checkpoint's files tell (see `facts.py`).
        planned: rows of the ledger as the plan has them.
        sleep_after_s: seconds without a request after which the GPU's memory is given back; None: never.
        sleep_level: 1 keeps the weights in main memory; 2 drops them, and waking reads them again.
        retry: whether a start that failed is tried once more with changed flags.
        replan: makes the choice to retry with; None: this one, with the changes that `diagnose` computes.
        startup_s: a start without an end is ended after so many seconds.
        idle_s: so is a start that has done nothing at all for so many seconds: no line of its log, no
            processor time, nothing read or written, no more memory of a GPU.

    Raises:
        RequestError: settings that contradict each other.
    """

    model: str = ""
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    attach: str | None = None
    api_key: str | None = field(default=None, repr=False)
    facts: Facts | None = None
    planned: tuple[LedgerRow, ...] = ()
    sleep_after_s: float | None = None
    sleep_level: Literal[1, 2] = 1
    retry: bool = True
    replan: Replan | None = None
    startup_s: float = STARTUP_S
    idle_s: float = IDLE_S

    def __post_init__(self) -> None:
        if self.attach is None and not self.model:
            raise RequestError("vLLM has to be told which model to serve", field="model")
        if self.attach is not None and (self.command or self.arguments or self.sleep_after_s):
            raise RequestError(
                "a vLLM that runs already keeps its own flags: --attach goes neither with --vllm-command, "
                "nor with flags, nor with sleeping",
                field="attach",
            )
        if self.attach is not None and not self.attach.startswith(("http://", "https://")):
            raise RequestError(
                f"--attach takes a vLLM server's URL, such as http://127.0.0.1:8001, not {self.attach!r}",
                field="attach",
            )
        if self.sleep_after_s is not None and self.sleep_after_s <= 0:
            raise RequestError(
                f"seconds until vLLM sleeps are more than 0, not {self.sleep_after_s:g}",
                field="sleep_after_s",
            )

    @property
    def card(self) -> Card | None:
        """Its GPU as the plan saw it, for a diagnosis."""
        return self.facts.card if self.facts is not None else None

    @property
    def name(self) -> str:
        """The model as people and requests know it."""
        return self.model or f"the model at {self.attach}"

    @property
    def folder(self) -> str:
        """The model as `vllm serve` finds it: our own one is not a Hub id."""
        return str(near(POCKET)) if self.model == POCKET else self.model
