"""Requests whose `max_tokens` is a ceiling and not a wish: Anthropic's, and Ollama's `num_predict`.

Their clients send large numbers as a matter of course (Anthropic's must send one). Where the context leaves
less than that, the answer ends when the context does.
"""

from dataclasses import replace

from snugvl.backends.protocol import Request
from snugvl.errors import RequestTooLarge
from snugvl.server.context import Context
from snugvl.server.generation import Generation, generate


async def generate_within(context: Context, request: Request) -> Generation:
    """Start a request with as many of its `max_tokens` as the context leaves.

    Raises:
        SnugvlError: refused; nothing was started.
    """
    most = request.sampling.max_tokens
    if most is not None and most < context.capabilities.context_tokens:
        try:
            return await generate(context, request)
        except RequestTooLarge as error:
            if error.field != "max_tokens":
                raise
    return await generate(context, replace(request, sampling=replace(request.sampling, max_tokens=None)))
