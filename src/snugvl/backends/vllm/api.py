"""vLLM's HTTP API, the part that snugvl uses beside the common one."""

from collections.abc import Mapping
from typing import Any, ClassVar

from snugvl.backends.child.http import CALL_S, ChildApi, Foreign, Served, list_of, object_of
from snugvl.errors import EngineError


class VllmApi(ChildApi):
    """Client of one vLLM server."""

    name: ClassVar = "vLLM"
    too_large: ClassVar = (
        "maximum context length", "maximum model length", "max_model_len", "encoder cache size"
    )  # fmt: skip

    async def served(self, wanted: str) -> Served:
        """See `ChildApi`."""
        response = await self.get("/v1/models", CALL_S)
        if response.status_code in (401, 403):
            raise Foreign(f"the vLLM at {self.where} wants an API key, or another one than it was given")
        listed = [
            card
            for card in list_of(object_of(response).get("data"))
            if isinstance(card, dict)
            and isinstance(card.get("id"), str)
            and isinstance(card.get("max_model_len"), int)
        ]
        version = object_of(await self.get("/version", CALL_S)).get("version")
        if not listed or not isinstance(version, str):
            asked = "GET /v1/models" if not listed else "GET /version"
            raise self.foreign(f"{asked} was not answered as vLLM does")
        cards = [card for card in listed if wanted in ("", card["id"])]
        if not cards:
            names = ", ".join(card["id"] for card in listed)
            raise Foreign(f"the vLLM at {self.where} serves {names}, not {wanted}")
        root = cards[0].get("root")
        return Served(
            cards[0]["id"], root if isinstance(root, str) else "", cards[0]["max_model_len"], version
        )

    async def text_tokens(self, text: str) -> tuple[int, ...]:
        """See `ChildApi`."""
        return await self.tokens({"prompt": text, "add_special_tokens": False})

    async def tokens(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """Token ids of a prompt or a conversation, by `POST /tokenize`."""
        found = (await self.call("/tokenize", body)).get("tokens")
        if not isinstance(found, list):
            raise EngineError("vLLM's answer to /tokenize has no tokens")
        return tuple(int(token) for token in found)
