"""A model's `Facts` from its GGUF and its server: pictures, template, control tokens."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from snugvl.backends.child.settings import Facts, flag_value, with_template
from snugvl.backends.llamacpp.api import ServedGguf
from snugvl.checkpoint.gguf import read_gguf
from snugvl.checkpoint.image_rules import FixedSquare, SmartResize
from snugvl.checkpoint.read import facts_of
from snugvl.errors import CheckpointError, SnugvlError
from snugvl.inputs.chat import ChatTemplate

TOKENS: Final = "tokenizer.ggml.tokens"
TYPES: Final = "tokenizer.ggml.token_type"
CONTROL: Final = 3  # the type of a token that stands for no text


class PictureTokens(NamedTuple):
    """A picture in llama.cpp's prompts: these texts around a number of placeholders."""

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
    """Read the facts of a file on this machine. Takes a moment: call it in a thread.

    Args:
        projector: its mmproj; None where it runs without.
        arguments: of the server, which bound the pictures.
    """
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
    """The server's chat template; None where it is no valid one."""
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
