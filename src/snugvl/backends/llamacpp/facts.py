"""A model's `Facts` from its GGUF and its server: pictures, template, control tokens; that server's API."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from snugvl.backends.child.http import ChildApi, Foreign, Served
from snugvl.backends.child.settings import Facts, flag_value, with_template
from snugvl.checkpoint.gguf import read_gguf
from snugvl.checkpoint.image_rules import FixedSquare, SmartResize
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, SnugvlError
from snugvl.inputs.chat import ChatTemplate

DEFAULT_MARKER = "<__media__>"  # of pictures in a prompt, where a server doesn't choose its own
TOKENS: Final = "tokenizer.ggml.tokens"
TYPES: Final = "tokenizer.ggml.token_type"
CONTROL: Final = 3  # the type of a token that stands for no text


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
        cards = await self.cards()
        props = await self.told("/props")
        generation = props.get("default_generation_settings")
        context = generation.get("n_ctx") if isinstance(generation, dict) else None
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
        return await self.tokens(text)

    async def tokens(self, text: str, *, bos: bool = False) -> tuple[int, ...]:
        """Token ids of a text, control tokens among them. `bos`: whether with the beginning-of-text token."""
        return await self.ids_of({"content": text, "add_special": bos, "parse_special": True})

    async def text_of(self, ids: tuple[int, ...]) -> str:
        """The text of token ids."""
        return str((await self.call("/detokenize", {"tokens": list(ids)})).get("content", ""))


def _text(values: dict[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _number(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0


class PictureTokens(NamedTuple):
    """Texts of a picture in a prompt: `begin`, a placeholder for each of its tokens, `end`."""

    begin: str
    placeholder: str
    end: str


QWEN: Final = PictureTokens("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
GEMMA: Final = PictureTokens("<start_of_image>", "<image_soft_token>", "<end_of_image>")


class GgufModel(NamedTuple):
    """A file's facts.

    `rule`: rule of its pictures' sizes; None where unknown, or where it sees none. `blind`: why it sees none,
    and what to do.
    """

    facts: Facts
    rule: SmartResize | FixedSquare | None = None
    blind: str = "its server was started without an mmproj; start it with --mmproj FILE"

    @property
    def picture(self) -> PictureTokens:
        """The tokens of a picture in its prompts."""
        return GEMMA if isinstance(self.rule, FixedSquare) else QWEN


def read_model(file: str, projector: str | None, arguments: Sequence[str]) -> GgufModel:
    """Read the facts of a file on this machine. Takes a moment: call it in a thread. `projector`: its mmproj;
    None where it runs without; `arguments`: of the server, which bound the pictures."""
    path = Path(file)
    if not file or not path.is_file():
        return GgufModel(Facts())
    try:
        control = control_tokens(path)
        found = facts_of(file, offline=True)
    except SnugvlError:  # llama.cpp runs more than can be planned
        return GgufModel(Facts(images=None if projector else False), blind=_blind(file, arguments, ""))
    dtypes = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    kind = found.gguf.file_type if found.gguf else ""
    facts = Facts(
        images=projector is not None,
        architecture=found.architecture,
        dtype=dtypes.get(kind, "float32"),
        weights=kind,
        control_tokens=control,
    )
    rule = None if found.vision is None else found.vision.rule
    if projector is None or not isinstance(rule, SmartResize | FixedSquare):
        return GgufModel(facts, blind=_blind(file, arguments, found.gguf.unlike if found.gguf else ""))
    least, most, factor = 0, rule.max_pixels, 0
    if isinstance(rule, SmartResize):
        least, factor = rule.min_pixels, rule.factor
        told = flag_value(tuple(arguments), "--image-max-tokens")
        most = min(most, int(told) * factor**2) if told else most
        told = flag_value(tuple(arguments), "--image-min-tokens")
        least = int(told) * factor**2 if told else least
    facts = replace(facts, max_pixels=most, min_pixels=min(least, most), pixel_factor=factor)
    return GgufModel(facts, rule)


def _blind(file: str, arguments: Sequence[str], unlike: str) -> str:
    if "--no-mmproj" in arguments:
        return "it was started so (--language-only, or --images 0); leave that out"
    beside = f"put the mmproj file of this model into {Path(file).absolute().parent}, or name another model"
    return f"{unlike.removesuffix('.') or 'no mmproj, which is its vision tower, lies beside it'}; {beside}"


def control_tokens(path: Path) -> tuple[str, ...]:
    """Strings that llama.cpp reads as control tokens, longest first.

    Raises:
        CheckpointError: the file can't be read.
    """
    values = read_gguf(path, keep=(TOKENS, TYPES)).values
    tokens, types = values.get(TOKENS), values.get(TYPES)
    if not isinstance(tokens, list) or not isinstance(types, list):
        return ()
    found = {text for text, kind in zip(tokens, types, strict=False) if kind == CONTROL and text}
    return tuple(sorted(found, key=len, reverse=True))


def template_of(served: ServedGguf) -> ChatTemplate | None:
    """The server's chat template; None where it is not a valid one."""
    try:
        return ChatTemplate(
            served.template,
            where="the GGUF's chat template",
            variables={"bos_token": served.bos, "eos_token": served.eos},
        )
    except CheckpointError:
        return None


def complete(facts: Facts, served: ServedGguf, template: ChatTemplate | None) -> Facts:
    """The facts, completed with the server's."""
    facts = replace(
        facts,
        images=served.sees if facts.images is None else facts.images and served.sees,
        weights=facts.weights or served.file_type,
        parameters=facts.parameters or served.parameters,
        control_tokens=(*facts.control_tokens, served.marker),
    )
    return facts if template is None else with_template(facts, template)
