"""A checkpoint folder opened with transformers: configuration, tokenizer, processor. (Weights: `network.py`.)

Everything is read from the folder, nothing is asked of a network, and no Python of the checkpoint runs unless
the user said so. Pictures are prepared by the Pillow form of each processor, so torchvision isn't needed;
videos are, by transformers' own processors, and without it a model takes pictures only.

Our own tokenizer (`inputs/tokenizer.py`) reads most of them exactly. Of any other that has a form in Rust, a
token's text is what decoding it after another token adds, which is right for all tokens of whole characters.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from snugvl.backends.transformers.requirements import check_code, check_method
from snugvl.checkpoint.section import read_json
from snugvl.errors import CheckpointError, DoesNotFit, SnugvlError, UnsupportedModel
from snugvl.inputs.tokenizer import Tokenizer, spelling_of

_auto: Any = transformers  # only partly typed
_images: Any = AutoImageProcessor  # by its own module: some versions ask torchvision for it elsewhere
_videos: Any = AutoVideoProcessor
_SEEING = ("AutoModelForImageTextToText", "AutoModelForVision2Seq")  # in the `auto_map` of foreign code
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A folder, and how it may be opened.

    Attributes:
        name: the model's name as the user gave it.
        config: the configuration that transformers read.
        own_code: whether Python files of the checkpoint run.
    """

    name: str
    folder: Path
    config: Any
    own_code: bool

    @property
    def sees(self) -> bool:
        """Whether transformers runs it with pictures."""
        if self.own_code:
            return any(name in getattr(self.config, "auto_map", {}) for name in _SEEING)
        return type(self.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    @property
    def widened(self) -> bool:
        """Whether weights become 16 bit wide on the way in.

        transformers multiplies FP8 by kernels that it downloads; nothing is downloaded here.
        """
        return isinstance(self.quantization, dict) and self.quantization.get("quant_method") == "fp8"

    @property
    def quantization(self) -> Any:
        """`quantization_config` of its config.json, or None."""
        return read_json(self.folder / "config.json").get("quantization_config")


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The parts that turn messages into inputs of the network. `processor` is None for text only."""

    tokenizer: Any
    processor: Any


def open_checkpoint(name: str, folder: Path, *, trusted: bool) -> Checkpoint:
    """Read a folder's configuration.

    Raises:
        UnsupportedModel: it needs foreign code, packages that are missing, or is not a model that talks.
        CheckpointError: config.json is missing or broken.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; it is not a complete checkpoint")
    settings = read_json(path)
    known = settings.get("model_type") in CONFIG_MAPPING
    check_code(name, folder, known, trusted=trusted)
    check_method(name, settings.get("quantization_config"), AUTO_QUANTIZATION_CONFIG_MAPPING.keys())
    with explained(name):
        config = _auto.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    found = Checkpoint(name, folder, config, not type(config).__module__.startswith("transformers."))
    if not found.own_code and not found.sees and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{name} is a {settings.get('model_type')!r}, which doesn't write text in transformers; take a "
            "model for chats, with or without pictures"
        )
    return found


def open_inputs(checkpoint: Checkpoint) -> Inputs:
    """The checkpoint's tokenizer and, for a model that sees, its processor.

    Raises:
        CheckpointError: files are missing or broken.
        UnsupportedModel: the processor needs packages that are missing.
    """
    options = {"local_files_only": True, "trust_remote_code": checkpoint.own_code}
    with explained(checkpoint.name):
        if not checkpoint.sees:
            return Inputs(_auto.AutoTokenizer.from_pretrained(checkpoint.folder, **options), None)
        if checkpoint.own_code:
            processor = _auto.AutoProcessor.from_pretrained(checkpoint.folder, **options)
        else:
            processor = _composed(checkpoint, options)
    if getattr(processor, "image_processor", None) is None:
        raise CheckpointError(f"{checkpoint.folder} has no settings of an image processor")
    return Inputs(processor.tokenizer, processor)


def _composed(checkpoint: Checkpoint, options: dict[str, Any]) -> Any:
    """The processor from its parts: pictures by Pillow, and nothing for what needs missing packages."""
    kind = _processor_class(checkpoint)

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    lenient: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    settings, _ = kind.get_processor_dict(checkpoint.folder, local_files_only=True)
    made = [_part(name, checkpoint, options) for name in kind.get_attributes()]
    return lenient.from_args_and_dict(made, settings)


def _part(name: str, checkpoint: Checkpoint, options: dict[str, Any]) -> Any:
    match name:
        case "tokenizer":
            return _auto.AutoTokenizer.from_pretrained(checkpoint.folder, **options)
        case "image_processor":
            return _images.from_pretrained(checkpoint.folder, backend="pil", **options)
        case "video_processor" if find_spec("torchvision") is not None:
            return _videos.from_pretrained(checkpoint.folder, **options)
        case "feature_extractor":  # of sound, which nobody can send; some processors look at its settings
            with suppress(OSError, ValueError, ImportError):
                return _auto.AutoFeatureExtractor.from_pretrained(checkpoint.folder, **options)
    return None


def _processor_class(checkpoint: Checkpoint) -> Any:
    """The processor class that one of the files names, else that of the architecture."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = checkpoint.folder / name
        named = read_json(path).get("processor_class") if path.is_file() else None
        found = processor_class_from_name(named) if isinstance(named, str) else None
        if found is not None:
            return found
    if type(checkpoint.config) not in PROCESSOR_MAPPING:
        raise UnsupportedModel(
            f"transformers has no processor for {type(checkpoint.config).__name__}, so it can't prepare its "
            "pictures; take another model, or a newer transformers"
        )
    return PROCESSOR_MAPPING[type(checkpoint.config)]


class DecodedTokenizer(Tokenizer):
    """A tokenizer whose tokens' bytes are found by decoding."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, eos_ids: frozenset[int], variables: dict[str, str]
    ) -> None:
        super().__init__(backend, eos_ids=eos_ids, variables=variables)
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._anchor = next((i for text in "aAeE.0" if (i := backend.token_to_id(text)) is not None), None)
        self._decoded = cache(self._decode_one)

    def least_tokens(self, text: str) -> int:
        """0: how such a tokenizer cuts text isn't known."""
        return 0

    def token_bytes(self, token_id: int) -> bytes:
        return self._decoded(token_id)

    def opening_bytes(self, token_id: int) -> bytes:
        """The bytes it stands for at the beginning of a text."""
        return self.decode([token_id], skip_special=False).encode()

    def _decode_one(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        text = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            return b""
        if byte := _BYTE.fullmatch(text):
            return bytes([int(byte[1], 16)])
        if self._anchor is None:
            return self.decode([token_id]).encode()
        before = self.decode([self._anchor])
        return self.decode([self._anchor, token_id]).removeprefix(before).encode()


def tokenizer_of(folder: Path, hugging: Any, eos_ids: frozenset[int]) -> Tokenizer:
    """`hugging`, a tokenizer that transformers loaded from `folder`, as ours. `eos_ids`: the model's.

    Raises:
        UnsupportedModel: it has no form in Rust, so grammars can't be applied to its tokens.
        CheckpointError: nothing ends an answer.
    """
    try:
        ours = Tokenizer.from_folder(folder)
    except (UnsupportedModel, CheckpointError):
        ours = None
    if ours is not None and ours.vocab_size >= len(hugging):
        ours.eos_ids |= eos_ids
        return ours
    backend = getattr(hugging, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModel(
            f"{folder} has a tokenizer in Python only ({type(hugging).__name__}), which this backend can't "
            "stream or constrain; a checkpoint with a tokenizer.json is needed"
        )
    backend = tokenizers.Tokenizer.from_str(backend.to_str())  # without what a call may set: padding
    backend.no_padding()
    backend.no_truncation()
    if hugging.eos_token_id is not None:
        eos_ids |= {hugging.eos_token_id}
    if not eos_ids:
        raise CheckpointError(f"{folder} names no token that ends an answer (eos_token_id)")
    variables = variables_of(hugging)
    try:  # files that name some tokens outside tokenizer.json
        spelling = spelling_of(backend, str(folder))
    except UnsupportedModel:
        return DecodedTokenizer(backend, eos_ids=eos_ids, variables=variables)
    return Tokenizer(backend, eos_ids=eos_ids, variables=variables, spelling=spelling)


def variables_of(hugging: Any) -> dict[str, str]:
    """bos_token, eos_token, …: what chat templates see."""
    return {name: str(text) for name in _NAMED if (text := getattr(hugging, name, None)) is not None}


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn exceptions of transformers within the block into snugvl's errors, with its own messages.

    Raises:
        UnsupportedModel, DoesNotFit, CheckpointError: a package is missing, memory ran out, or anything else.
    """
    try:
        yield
    except SnugvlError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        if isinstance(error, ImportError):
            raise UnsupportedModel(f"{name} needs something that is not installed: {text}") from None
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise DoesNotFit(
                f"memory ran out while {name} was loaded; close other programs, or take fewer bits or a "
                f"smaller model: {text}"
            ) from None
        raise CheckpointError(f"transformers can't load {name}: {type(error).__name__}: {text}") from None
