"""llama-server's HTTP API, the part that snugvl uses beside the common one."""

from dataclasses import dataclass
from typing import Any, ClassVar

from snugvl.backends.child.http import CALL_S, ChildApi, Foreign, Served, list_of, object_of
from snugvl.errors import EngineError

DEFAULT_MARKER = "<__media__>"  # of pictures in a prompt, where a server doesn't choose its own


@dataclass(frozen=True, slots=True)
class ServedGguf(Served):
    """The model behind an address, with its server's facts.

    Attributes:
        template: the chat template.
        bos, eos: texts of these tokens; `adds_bos`: whether the server puts the former before a text.
        marker: text that stands for a picture in a prompt.
        vocabulary: number of tokens of the vocabulary; 0 for unknown.
        parameters, file_type: number of weights and quantisation, from its file.
        slots: number of requests that run at a time, each with a context of its own.
        sees: whether it takes pictures.
    """

    template: str = ""
    bos: str = ""
    eos: str = ""
    adds_bos: bool = False
    marker: str = DEFAULT_MARKER
    vocabulary: int = 0
    parameters: int = 0
    file_type: str = ""
    slots: int = 1
    sees: bool = False


class LlamacppApi(ChildApi):
    """Talks to one llama-server."""

    name: ClassVar = "llama.cpp"
    too_large: ClassVar = ("exceeds the available context size",)

    async def served(self, wanted: str) -> Served:
        """See `ChildApi`."""
        response = await self.get("/props", CALL_S)
        if response.status_code in (401, 403):
            raise Foreign(f"the llama.cpp at {self.where} wants an API key, or another one than it was given")
        props = object_of(response)
        generation = props.get("default_generation_settings")
        context = generation.get("n_ctx") if isinstance(generation, dict) else None
        cards = list_of(object_of(await self.get("/v1/models", CALL_S)).get("data"))
        card = cards[0] if cards and isinstance(cards[0], dict) else {}
        name = card.get("id")
        if not isinstance(context, int) or not isinstance(name, str):
            asked = "GET /v1/models" if isinstance(context, int) else "GET /props"
            raise self.foreign(f"{asked} was not answered as llama-server does")
        if wanted not in ("", name):
            raise Foreign(f"the llama.cpp at {self.where} serves {name}, not {wanted}")
        meta = card.get("meta")
        meta = meta if isinstance(meta, dict) else {}
        modalities = props.get("modalities")
        return ServedGguf(
            model=name,
            root=_text(props, "model_path"),
            context_tokens=context,
            version=_text(props, "build_info"),
            template=_text(props, "chat_template"),
            bos=_text(props, "bos_token"),
            eos=_text(props, "eos_token"),
            adds_bos=bool(await self.tokens("", bos=True)),
            marker=_text(props, "media_marker") or DEFAULT_MARKER,
            vocabulary=_number(meta, "n_vocab"),
            parameters=_number(meta, "n_params"),
            file_type=_text(meta, "ftype") or _text(props, "model_ftype"),
            slots=max(_number(props, "total_slots"), 1),
            sees=isinstance(modalities, dict) and bool(modalities.get("vision")),
        )

    async def text_tokens(self, text: str) -> tuple[int, ...]:
        """See `ChildApi`."""
        return await self.tokens(text)

    async def tokens(self, text: str, *, bos: bool = False) -> tuple[int, ...]:
        """Token ids of a text, control tokens among them. `bos`: whether with the beginning-of-text token."""
        body = {"content": text, "add_special": bos, "parse_special": True}
        found = (await self.call("/tokenize", body)).get("tokens")
        if not isinstance(found, list):
            raise EngineError("llama.cpp's answer to /tokenize has no tokens")
        return tuple(int(token) for token in found)

    async def text_of(self, ids: tuple[int, ...]) -> str:
        """The text of token ids."""
        return str((await self.call("/detokenize", {"tokens": list(ids)})).get("content", ""))


def _text(values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _number(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0
