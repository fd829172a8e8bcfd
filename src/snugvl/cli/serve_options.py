"""What `snugvl serve` is asked to load and to run it with; what doesn't go together is refused by name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from snugvl.cli import options

Backend = Literal["auto", "native", "transformers", "vllm"]

BackendOption = Annotated[
    Backend, typer.Option("--backend", help="Which engine; auto: the plan's choice, which says why.")
]
VllmCommand = Annotated[
    str | None,
    typer.Option(
        "--vllm-command", metavar="WORDS", help="What stands for vllm, such as '/opt/venv/bin/vllm'."
    ),
]
Attach = Annotated[
    str | None,
    typer.Option(
        "--attach", metavar="URL", help="Use a vLLM server that runs already; nothing is planned or started."
    ),
]
AttachKey = Annotated[
    str | None, typer.Option("--attach-api-key", metavar="KEY", help="Key of the server to attach to.")
]
NoRetry = Annotated[
    bool, typer.Option("--no-retry", help="Don't plan again and retry once when vLLM fails to start.")
]
SleepAfter = Annotated[
    float | None,
    typer.Option(
        "--sleep-after",
        metavar="SECONDS",
        help="vLLM gives GPU memory back after so long without a request; the next one wakes it.",
    ),
]
ImagesPlanned = Annotated[
    int | None, typer.Option("--images", min=0, help="Images of one request that vLLM reserves for (1).")
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, help="Requests that are sure of their whole context in vLLM (1)."),
]
LanguageOnly = Annotated[
    bool, typer.Option("--language-only", help="Leave the vision tower out: less memory, no pictures.")
]
NoPrefixCache = Annotated[
    bool,
    typer.Option(
        "--no-prefix-cache",
        help="Compute every prompt from its start, so that timing tells nobody what others asked.",
    ),
]
StepGraphs = Annotated[
    bool | None,
    typer.Option(
        "--step-graphs/--no-step-graphs",
        help="CUDA graphs of prompts and small pictures too, where GPU memory is plenty (on).",
    ),
]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which engine, and what only some engines have.

    Attributes:
        attach: URL of a vLLM server that runs.
        sleep_after_s: seconds without a request after which vLLM's memory is given back.
        images, concurrency: what vLLM's plan is made for; None: 1.
        step_graphs: of our own engine; None: on, said by nobody.
    """

    backend: Backend = "auto"
    vllm_command: str | None = None
    attach: str | None = None
    attach_api_key: str | None = None
    retry: bool = True
    sleep_after_s: float | None = None
    images: int | None = None
    concurrency: int | None = None
    language_only: bool = False
    trust_remote_code: bool = False
    prefix_cache: bool = True
    tower: options.TowerName = "auto"
    step_graphs: bool | None = None
    embedding: options.EmbeddingName = "auto"

    def __post_init__(self) -> None:
        if self.attach_api_key is not None and self.attach is None:
            raise typer.BadParameter("--attach-api-key is the key of a server: name it with --attach")
        if self.attach is not None:
            if self.backend not in ("auto", "vllm"):
                raise typer.BadParameter(f"--attach takes a vLLM server, not --backend {self.backend}")
            self._refuse_with_attach()
        elif self.backend != "auto":
            self.check(self.backend, f"--backend {self.backend}")
        if self.language_only and self.images:
            raise typer.BadParameter(
                f"--language-only serves no pictures, --images {self.images} wants some; leave one out"
            )
        if self.language_only and self.tower == "streamed":
            raise typer.BadParameter("--language-only leaves no vision tower to stream; leave --tower out")
        if self.vllm_command is not None and not self.command:
            raise typer.BadParameter("--vllm-command is empty; name a program, such as /opt/venv/bin/vllm")

    @property
    def command(self) -> tuple[str, ...]:
        """The words that stand for vllm."""
        try:
            return tuple(shlex.split(self.vllm_command or ""))
        except ValueError as error:
            raise typer.BadParameter(f"--vllm-command {self.vllm_command!r}: {error}") from None

    def check(self, engine: str, why: str) -> None:
        """Refuse what an engine doesn't have. `why`: how it came to be this engine."""
        if engine != "vllm" and (said := [name for name, given in self._of_vllm().items() if given]):
            raise typer.BadParameter(
                f"{' and '.join(said)} {_is(said)} vLLM's alone ({why}); say --backend vllm, or leave "
                f"{_it(said)} out"
            )
        if engine != "native" and self.tower == "streamed":
            raise typer.BadParameter(
                f"--tower streamed is our own engine's alone ({why}); say --backend native, or leave it out"
            )
        if engine != "native" and self.embedding == "cpu":
            raise typer.BadParameter(
                f"--embedding cpu is our own engine's alone ({why}); say --backend native, or leave it out"
            )
        if engine != "native" and self.step_graphs is not None:
            raise typer.BadParameter(
                f"{self._graphs} is for our own engine alone ({why}); say --backend native, or leave it out"
            )
        if engine == "native" and self.trust_remote_code:
            raise typer.BadParameter(
                f"--trust-remote-code is not for our own engine, which runs no checkpoint's code ({why}); "
                "say --backend transformers or vllm, or leave it out"
            )

    @property
    def _graphs(self) -> str:
        return "--step-graphs" if self.step_graphs else "--no-step-graphs"

    def _of_vllm(self) -> dict[str, bool]:
        return {
            "--vllm-command": self.vllm_command is not None,
            "--no-retry": not self.retry,
            "--sleep-after": self.sleep_after_s is not None,
            "--images": self.images is not None,
            "--concurrency": self.concurrency is not None,
        }

    def _refuse_with_attach(self) -> None:
        given = self._of_vllm() | {
            "--language-only": self.language_only,
            "--tower": self.tower != "auto",
            "--embedding": self.embedding != "auto",
            "--trust-remote-code": self.trust_remote_code,
            "--no-prefix-cache": not self.prefix_cache,
            self._graphs: self.step_graphs is not None,
        }
        if said := [name for name, there in given.items() if there]:
            raise typer.BadParameter(_running(said))


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What to load, and within which limits. Without a model: the best that is here."""

    model: str | None
    device: str = "auto"
    dtype: options.DtypeName = "auto"
    context: int | None = None
    max_pixels: int | None = None
    weights: options.WeightsName = "auto"
    memory_bytes: int | None = None
    max_queue: int | None = None
    kv_cache: options.KVCacheName = "auto"

    def check_attach(self) -> None:
        """Refuse what a server that runs already has decided."""
        given = {
            "--device": self.device != "auto",
            "--dtype": self.dtype != "auto",
            "--context": self.context is not None,
            "--max-pixels": self.max_pixels is not None,
            "--weights": self.weights != "auto",
            "--kv-cache": self.kv_cache != "auto",
            "--memory": self.memory_bytes is not None,
            "--max-queue": self.max_queue is not None,
        }
        if said := [name for name, there in given.items() if there]:
            raise typer.BadParameter(_running(said))

    def check_vllm(self, why: str) -> None:
        """Refuse what vLLM has no place for."""
        given = {"--dtype": self.dtype != "auto", "--max-queue": self.max_queue is not None}
        if said := [name for name, there in given.items() if there]:
            raise typer.BadParameter(
                f"{' and '.join(said)} {_is(said)} not for vLLM ({why}); leave {_it(said)} out"
            )


def _running(said: list[str]) -> str:
    return (
        f"{' and '.join(said)} can't be chosen for a vLLM that runs already (--attach); leave {_it(said)} "
        "out, or start vLLM with snugvl: --backend vllm"
    )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
