"""A checkpoint folder opened with transformers: configuration, processor, network.

Everything is read from the folder, nothing is asked of a network, and no Python of the checkpoint runs unless
the user said so. Pictures are prepared by the Pillow form of each processor, so torchvision isn't needed;
videos are, by transformers' own processors, and without it a model takes pictures only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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

_auto: Any = transformers  # only partly typed
_images: Any = AutoImageProcessor  # by its own module: some versions ask torchvision for it elsewhere
_videos: Any = AutoVideoProcessor
_SEEING = ("AutoModelForImageTextToText", "AutoModelForVision2Seq")  # in the `auto_map` of foreign code


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A folder, and how it may be opened.

    Attributes:
        name: as the user said it.
        config: of transformers.
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
    """What turns messages into what the network takes. `processor` is None for text only."""

    tokenizer: Any
    processor: Any


def open_checkpoint(name: str, folder: Path, *, trusted: bool) -> Checkpoint:
    """Read a folder's configuration.

    Raises:
        UnsupportedModel: it needs foreign code, packages that are missing, or is no model that talks.
        CheckpointError: config.json is missing or broken.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no config.json; it is not a complete checkpoint")
    settings = read_json(path)
    known = settings.get("model_type") in CONFIG_MAPPING
    check_code(name, folder, known, trusted=trusted)
    check_method(name, settings.get("quantization_config"), AUTO_QUANTIZATION_CONFIG_MAPPING.keys())
    with _explained(name):
        config = _auto.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    found = Checkpoint(name, folder, config, not type(config).__module__.startswith("transformers."))
    if not found.own_code and not found.sees and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"{name} is a {settings.get('model_type')!r}, with which transformers answers no questions about "
            "text or pictures"
        )
    return found


def open_inputs(checkpoint: Checkpoint) -> Inputs:
    """Its tokenizer and, of a model that sees, its processor.

    Raises:
        CheckpointError: files are missing or broken.
        UnsupportedModel: the processor needs packages that are missing.
    """
    options = {"local_files_only": True, "trust_remote_code": checkpoint.own_code}
    with _explained(checkpoint.name):
        if not checkpoint.sees:
            return Inputs(_auto.AutoTokenizer.from_pretrained(checkpoint.folder, **options), None)
        if checkpoint.own_code:
            processor = _auto.AutoProcessor.from_pretrained(checkpoint.folder, **options)
        else:
            processor = _composed(checkpoint, options)
    if getattr(processor, "image_processor", None) is None:
        raise CheckpointError(f"{checkpoint.folder} has no settings of an image processor")
    return Inputs(processor.tokenizer, processor)


def open_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device_map: Mapping[str, str] | None,
    weights: str,
) -> Any:
    """The network, its weights in place.

    Args:
        dtype: of what the checkpoint doesn't quantise.
        device_map: module to device, or None for main memory.
        weights: "int8" and "int4" are made by bitsandbytes on the way.

    Raises:
        CheckpointError: weights are missing, broken or another model's; or the map names no such module.
        UnsupportedModel: what it needs isn't installed, or it can't generate.
        DoesNotFit: memory ran out on the way.
    """
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    options["trust_remote_code"] = checkpoint.own_code
    if checkpoint.widened:
        checkpoint.config.quantization_config["dequantize"] = True
    if device_map is not None:
        options["device_map"] = dict(device_map)
        if "disk" in device_map.values():
            options["offload_folder"] = _disk_folder()
    if weights in ("int8", "int4"):
        options["quantization_config"] = _bitsandbytes(weights, dtype)
    opener = _auto.AutoModelForImageTextToText if checkpoint.sees else _auto.AutoModelForCausalLM
    with _explained(checkpoint.name):
        model, report = opener.from_pretrained(
            checkpoint.folder, config=checkpoint.config, output_loading_info=True, **options
        )
    if not callable(getattr(model, "generate", None)):
        raise UnsupportedModel(f"{checkpoint.name} ({type(model).__name__}) can't generate text")
    _check_report(checkpoint.name, report)
    plain_generation(model)
    return model.eval()


def skeleton_of(checkpoint: Checkpoint, dtype: torch.dtype) -> torch.nn.Module:
    """The network without memory, to ask its modules' names."""
    opener = _auto.AutoModelForImageTextToText if checkpoint.sees else _auto.AutoModelForCausalLM
    with _explained(checkpoint.name), torch.device("meta"):
        return opener.from_config(  # type: ignore[no-any-return]
            checkpoint.config, dtype=dtype, trust_remote_code=checkpoint.own_code
        )


def _check_report(name: str, report: Mapping[str, Any]) -> None:
    """transformers fills what a file lacks with random numbers; nobody wants answers from those."""
    missing = sorted(report.get("missing_keys") or ())
    mismatched = sorted(str(each[0]) for each in report.get("mismatched_keys") or ())
    if missing or mismatched:
        few = ", ".join((missing or mismatched)[:3])
        what = "are missing" if missing else "have another shape than config.json says"
        raise CheckpointError(f"{len(missing or mismatched)} weights of {name} {what}: {few}")


def plain_generation(model: Any) -> None:
    """Leave of the generation settings only tokens: sampling is ours, and so are the limits."""
    own = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    kept = {name: getattr(own, name, None) for name in names}
    if kept["pad_token_id"] is None:  # else a warning at every prompt; nothing is ever padded with it
        eos = kept["eos_token_id"]
        kept["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    suppressed = getattr(own, "suppress_tokens", None)
    model.generation_config = _auto.GenerationConfig(**kept, suppress_tokens=suppressed)


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
    """As one of the files names it, else the one of the architecture."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        path = checkpoint.folder / name
        named = read_json(path).get("processor_class") if path.is_file() else None
        found = processor_class_from_name(named) if isinstance(named, str) else None
        if found is not None:
            return found
    if type(checkpoint.config) not in PROCESSOR_MAPPING:
        raise UnsupportedModel(f"transformers has no processor for {type(checkpoint.config).__name__}")
    return PROCESSOR_MAPPING[type(checkpoint.config)]


def _bitsandbytes(weights: str, dtype: torch.dtype) -> Any:
    if weights == "int8":
        return _auto.BitsAndBytesConfig(load_in_8bit=True)
    return _auto.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_type="nf4"
    )


_folders: list[TemporaryDirectory[str]] = []  # of what was put on disk, until this process ends


def _disk_folder() -> str:
    folder = TemporaryDirectory(prefix="snugvl-offload-")
    _folders.append(folder)
    return folder.name


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """What transformers raises, as our errors: it says best itself what it lacks."""
    try:
        yield
    except SnugvlError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        if isinstance(error, ImportError):
            raise UnsupportedModel(f"{name} needs something that is not installed: {text}") from None
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise DoesNotFit(f"memory ran out while {name} was loaded: {text}") from None
        raise CheckpointError(f"transformers can't load {name}: {type(error).__name__}: {text}") from None
