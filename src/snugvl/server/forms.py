"""multipart/form-data as it comes in: text must be UTF-8, whatever else the form says."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from snugvl.server.context import context_of
from snugvl.server.validation import InvalidRequest

# What the parser has to say of a form, our answer says.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


@asynccontextmanager
async def form_of(request: Request, *, max_files: int, max_fields: int) -> AsyncIterator[FormData]:
    """The form in a request's body; its files are closed at the end of the block.

    Raises:
        InvalidRequest: it is malformed, has too many parts, or text that is not UTF-8.
    """
    limit = context_of(request).settings.max_body_bytes
    try:
        async with aclosing(request.stream()) as stream:
            parser = _Parser(
                request.headers, stream, max_files=max_files, max_fields=max_fields, max_part_size=limit
            )
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(
            f"the form can't be read: {error.message}", field=None, code="invalid_form"
        ) from None
    try:
        yield form
    finally:
        await form.close()


class _Parser(MultiPartParser):
    """Starlette's, which takes what is not UTF-8 for Latin-1, and believes a form about its charset."""

    def on_headers_finished(self) -> None:
        self._charset = "utf-8"
        super().on_headers_finished()

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidRequest(
                    f"{part.field_name} is not UTF-8: {error.reason} at byte {error.start}; "
                    "a picture needs a file name: -F image=@FILE with curl",
                    field=part.field_name,
                    code="invalid_form",
                ) from None
        super().on_part_end()
