"""Needs of transformers to load a checkpoint, said before it fails: packages, and trust in foreign code."""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from snugvl.checkpoint.section import read_json
from snugvl.core.formats import BITSANDBYTES
from snugvl.errors import EngineError, RequestError, UnsupportedModel

# Modules that a quantisation method needs, and the packages that bring them. Methods that aren't here need
# nothing, or say themselves what they need (see `opening.open_model`).
_PACKAGES: Final[Mapping[str, Mapping[str, str]]] = {
    "bitsandbytes": {"bitsandbytes": "bitsandbytes"},
    "torchao": {"torchao": "torchao"},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "awq": {"gptqmodel": "gptqmodel"},
    "gptq": {"optimum": "optimum", "gptqmodel": "gptqmodel"},
    "hqq": {"hqq": "hqq"},
    "aqlm": {"aqlm": "aqlm"},
    "quanto": {"optimum.quanto": "optimum-quanto"},
    "mxfp4": {"kernels": "kernels"},
    "auto-round": {"auto_round": "auto-round"},
    "auto_round": {"auto_round": "auto-round"},
}


def check_installed() -> None:
    """Raise EngineError if the packages of the extra `snugvl[transformers]` are missing."""
    missing = [name for name in ("transformers", "accelerate") if not _found(name)]
    if missing:
        raise EngineError(
            f"the transformers backend needs {' and '.join(missing)}; install with: "
            "pip install 'snugvl[transformers]'"
        )


def check_method(model: str, quantization: object, known: Collection[str]) -> None:
    """Raise UnsupportedModel if a checkpoint's quantisation can't be read here.

    Args:
        quantization: `quantization_config` of its config.json, or None.
        known: methods of this version of transformers, which would leave any other out without a word.
    """
    if quantization is None:
        return
    method = str(quantization.get("quant_method")) if isinstance(quantization, Mapping) else "no method"
    if method not in known and not any(name.startswith(f"{method}_") for name in known):
        raise UnsupportedModel(
            f"{model} is quantised by {method!r}, which transformers doesn't know; take another edition of it"
        )
    missing = [package for module, package in _PACKAGES.get(method, {}).items() if not _found(module)]
    if missing:
        raise UnsupportedModel(
            f"{model} is quantised by {method}, which needs {' and '.join(missing)}; install with: "
            f"pip install {' '.join(missing)}"
        )


def check_weights(weights: str, quantization: object) -> None:
    """Raise RequestError if the wished weight format is impossible.

    Integers are made by bitsandbytes on the way in, of checkpoints that aren't quantised yet.
    """
    if weights in ("auto", "bf16") and not (weights == "bf16" and quantization):
        return
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise RequestError(
            f"the checkpoint is quantised already ({method}); it is loaded as it is: use weights 'auto'",
            field="weights",
        )
    if weights not in BITSANDBYTES:
        raise RequestError(
            f"the transformers backend makes no {weights!r} weights; use auto, bf16, "
            f"{' or '.join(BITSANDBYTES)}, or a checkpoint that is stored so",
            field="weights",
        )
    if not _found("bitsandbytes"):
        raise RequestError(
            f"weights {weights!r} are made by bitsandbytes here, which is not installed; install it with: "
            "pip install bitsandbytes, or use our own engine (--backend native), which needs nothing",
            field="weights",
        )


def check_code(model: str, folder: Path, known: bool, *, trusted: bool) -> None:
    """Raise UnsupportedModel if the checkpoint only runs with Python files of its own, unless trusted.

    `known`: whether transformers has the architecture itself.
    """
    if known or trusted:
        return
    settings = read_json(folder / "config.json")
    kind = settings.get("model_type")
    if settings.get("auto_map"):
        files = ", ".join(sorted(path.name for path in folder.glob("*.py"))) or "files of another repository"
        raise UnsupportedModel(
            f"{model} ({kind!r}) runs only with Python code that it brings itself ({files}), and that code "
            "could do whatever you can: read your files, open connections. If you have read it and trust it, "
            "add --trust-remote-code (trust_remote_code=True)"
        )
    import transformers

    raise UnsupportedModel(
        f"{model} is of the kind {kind!r}, which transformers {transformers.__version__} doesn't know; a "
        "newer one may: pip install -U transformers"
    )


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that isn't there, or half there
        return False
