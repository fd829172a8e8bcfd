"""Values of options: checked when they are typed or set, and completed by the shell."""

from typing import Final

import typer

from snugvl.cli.terminal import say
from snugvl.core.addresses import http_address
from snugvl.core.options import LoadOptions
from snugvl.core.sizes import format_size, parse_size
from snugvl.errors import InputError, RequestError

SOLD_AS: Final = ("--vram", "--ram")  # memory that people know by the number on its box, which is of GiB


def address(value: str | None) -> str | None:
    """A server's address as it was typed, with http:// where that was left out.

    Raises:
        typer.BadParameter: it is no address.
    """
    found = None if value is None else http_address(value)
    if found is not None and not found.startswith(("http://", "https://")):
        raise typer.BadParameter(
            f"{value!r} is not the address of a server; give one such as http://127.0.0.1:8000"
        )
    return found


def device(value: str | None) -> str | None:
    """A device as it was typed.

    Raises:
        typer.BadParameter: it is none.
    """
    if value is not None:
        try:
            LoadOptions(device=value)
        except RequestError as error:
            raise typer.BadParameter(str(error)) from None
    return value


def size(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """A size as it was typed.

    Raises:
        typer.BadParameter: it is none, or nothing where there must be something.
    """
    if value is not None:
        option = parameter.opts[0]
        try:
            nbytes = parse_size(value, option)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None
        if not nbytes and option != "--held":
            raise typer.BadParameter(f"{option} {value!r} is nothing; write it like 951MiB, 7.2GiB or 8GB")
        if option in SOLD_AS and value.strip().lower().endswith("gb"):
            number = value.strip()[:-2].strip()
            say(f"{option} {value} is {format_size(nbytes)}; what is sold as {number} GB has {number}GiB")
    return value


def _here() -> list[str]:
    from snugvl.checkpoint.cached import cached

    return ["pocket", *(each.name for each in cached())]


def downloaded_models(incomplete: str) -> list[str]:
    """Names of models on this machine that begin so, for the shell."""
    return [name for name in _here() if name.startswith(incomplete)]


def known_models(incomplete: str) -> list[str]:
    """Names of models on this machine and in the catalogue that begin so, for the shell."""
    from snugvl.checkpoint.catalogue import entries

    known = dict.fromkeys(form.repo for entry in entries() for form in entry.forms)
    known |= dict.fromkeys(_here())
    return [name for name in known if name.startswith(incomplete)]
