"""The options that commands share, and what they become."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from snugvl.sampling import SamplingParams

DEFAULT_MODEL = "pocket"

Images = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGE",
        help="Files, folders, quoted globs ('photos/**/*.jpg'), or - for standard input.",
    ),
]
Recursive = Annotated[bool, typer.Option("--recursive", "-r", help="Go into the folders of a folder.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="SNUGVL_MODEL",
        metavar="MODEL",
        show_default=DEFAULT_MODEL,
        help="Checkpoint: a folder or a Hub id; with --server, a name that it serves.",
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="SNUGVL_SERVER", metavar="URL", help="Ask a running `snugvl serve` instead."
    ),
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="SNUGVL_API_KEY", metavar="KEY", help="Key of the server.")
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
Dtype = Annotated[
    DtypeName,
    typer.Option("--dtype", help="Number format of weights and cache."),
]
WeightsName = Literal["auto", "bf16", "fp8", "int8", "int4"]
Weights = Annotated[
    WeightsName,
    typer.Option("--weights", help="Format of the weights in memory; auto: the best that fits."),
]
KVCacheName = Literal["auto", "bf16", "fp8"]
KVCache = Annotated[
    KVCacheName,
    typer.Option("--kv-cache", help="Format of keys and values; fp8 is half as large. auto: where it helps."),
]
Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Take at most this much memory, such as 7200MiB."),
]
TowerName = Literal["auto", "resident", "streamed"]
Tower = Annotated[
    TowerName,
    typer.Option(
        "--tower",
        help="The vision tower's weights: resident on the GPU, or streamed from main memory for every "
        "picture; auto: streamed where nothing else fits.",
    ),
]
EmbeddingName = Literal["auto", "gpu", "cpu"]
Embedding = Annotated[
    EmbeddingName,
    typer.Option(
        "--embedding",
        help="The embedding: on the gpu, or cpu: in main memory, where the GPU reads a row for each token; "
        "auto: there where that makes room (not under WSL2).",
    ),
]
BackendName = Literal["auto", "native", "transformers"]
Backend = Annotated[
    BackendName,
    typer.Option("--backend", help="Which engine; auto: ours where it runs the model, else transformers."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python files that the checkpoint brings.")
]
Context = Annotated[
    int | None, typer.Option("--context", min=1, help="Tokens of prompt, images and answer together.")
]
MaxPixels = Annotated[
    int | None, typer.Option("--max-pixels", min=1, help="Scale larger images down to this many pixels.")
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Longest answer; the default suits the task.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, max=2.0, help="0 always takes the likeliest word.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Repeats the draw of a temperature above 0.")]
Json = Annotated[bool, typer.Option("--json", help="JSON Lines: one object per image.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write JSON Lines to a new file.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the --output file: skip images that it has a result for.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only errors on standard error.")]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model, and how to load it; or which server has it.

    `model` is None where neither was said: pocket, or the first name that the server serves.
    """

    model: str | None
    device: str
    dtype: DtypeName
    context: int | None
    max_pixels: int | None
    server: str | None = None
    api_key: str | None = None
    weights: WeightsName = "auto"
    memory: str | None = None
    backend: BackendName = "auto"
    trust_remote_code: bool = False
    tower: TowerName = "auto"
    kv_cache: KVCacheName = "auto"
    embedding: EmbeddingName = "auto"

    def __post_init__(self) -> None:
        if self.backend == "native" and self.trust_remote_code:
            raise typer.BadParameter(
                "--trust-remote-code is not for our own engine, which runs no checkpoint's code; say "
                "--backend transformers, or leave it out"
            )
        if self.server is None:
            return
        local = {
            "--device": self.device != "auto",
            "--dtype": self.dtype != "auto",
            "--context": self.context,
            "--weights": self.weights != "auto",
            "--kv-cache": self.kv_cache != "auto",
            "--memory": self.memory,
            "--backend": self.backend != "auto",
            "--tower": self.tower != "auto",
            "--embedding": self.embedding != "auto",
            "--trust-remote-code": self.trust_remote_code,
        }
        if said := [name for name, given in local.items() if given]:
            raise typer.BadParameter(
                f"{' and '.join(said)} can't be chosen for a model that a server has loaded "
                f"({self.server}); leave {'it' if len(said) == 1 else 'them'} out, or --server"
            )

    @property
    def name(self) -> str:
        """The model's name, after `session.resolve`."""
        assert self.model is not None
        return self.model


@dataclass(frozen=True, slots=True)
class Generation:
    """How to generate."""

    max_tokens: int | None
    temperature: float
    seed: int | None

    def sampling(self) -> SamplingParams:
        """The same for the tasks."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)

    def chosen(self) -> dict[str, Any]:
        """What differs from the defaults: part of what tells one run from another."""
        chosen: dict[str, Any] = {}
        if self.max_tokens is not None:
            chosen["max_tokens"] = self.max_tokens
        if self.temperature:
            chosen |= {"temperature": self.temperature, "seed": self.seed}
        return chosen


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """Where results go. `path` is a JSON Lines file."""

    json: bool
    path: Path | None
    resume: bool
    quiet: bool

    def __post_init__(self) -> None:
        if self.resume and self.path is None:
            raise typer.BadParameter("--resume continues a file: name it with --output")
