"""The options of `snugvl serve` that are about the server, whatever runs behind it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from snugvl.cli.options import downloaded_models

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        envvar="SNUGVL_MODEL",
        autocompletion=downloaded_models,
        help="A folder, a Hub id or pocket; without one the best that is downloaded and fits.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", metavar="NAME", help="What requests call the model; repeatable."),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key", metavar="KEY", help="A key that requests may use; repeatable. Also SNUGVL_API_KEY."
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", metavar="FILE", help="More keys, one a line; # comments.")
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin", metavar="ORIGIN", help="A web page's address that may ask, or '*'; repeatable."
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free one.")]
NoAuth = Annotated[
    bool, typer.Option("--no-auth", help="Ask nobody for a key, also on addresses that other machines reach.")
]
MaxConcurrent = Annotated[
    int,
    typer.Option("--max-concurrent", min=1, help="Requests at once, waiting ones included; then 429."),
]
Deadline = Annotated[
    float, typer.Option("--deadline", min=0, help="Seconds a request may take in all; 0 for no limit.")
]
Drain = Annotated[
    float, typer.Option("--drain", min=0, help="Seconds that running requests may still take after Ctrl+C.")
]
MaxBody = Annotated[int, typer.Option("--max-body", min=1, help="MiB of one request.")]
AllowLocalMedia = Annotated[
    Path | None,
    typer.Option("--allow-local-media", metavar="DIR", help="Let file: URLs read below this folder."),
]
AllowPrivateMedia = Annotated[
    bool, typer.Option("--allow-private-media", help="Let picture URLs point to private addresses.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", help="debug shows polls of /health, /memory and /metrics, too."),
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Log what people ask and what they get.")]
KeyRequestsPerMinute = Annotated[
    int | None, typer.Option("--key-requests-per-minute", min=1, help="Requests a minute of each API key.")
]
KeyConcurrent = Annotated[
    int | None, typer.Option("--key-concurrent", min=1, help="Requests at once of each API key.")
]
