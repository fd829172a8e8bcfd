"""How a checkpoint wants pictures and videos prepared, read from its own files and checked.

A value that would change pixels and that isn't implemented is refused by name; nothing is guessed except
the defaults that Hugging Face's own processors have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from snugvl.checkpoint.section import read_json
from snugvl.errors import CheckpointError

# Switches of transformers' processors that we have only one way of.
_FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "do_pad": False,
}
_BICUBIC = int(Image.Resampling.BICUBIC)


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """From an RGB image to patches.

    Attributes:
        patch_size, merge_size: a patch's side in pixels; patches per side of a token.
        temporal_patch_size: frames in a patch.
        min_pixels, max_pixels: limits of the scaled area (of all frames together for a video).
        mean, std: per channel, in units of `rescale_factor`.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    resample: int

    @property
    def factor(self) -> int:
        """Side of the square that becomes one token, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_dim(self) -> int:
        """Values in one flattened patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class FrameCap:
    """Whether, besides the limit of all frames, each frame of a video is bounded: by how many tokens."""

    applies: bool
    max_tokens: int


def read_pixel_settings(folder: Path, *, video: bool = False) -> PixelSettings:
    """The settings of a checkpoint folder's image (or video) preprocessor.

    Raises:
        CheckpointError: a file is missing, or a value is missing, nonsense or not implemented.
    """
    values, where = _section(folder, video)
    for key, wanted in _FIXED.items():
        if values.get(key) not in (None, wanted):
            raise CheckpointError(f"{where} has {key!r} = {values[key]!r}; only {wanted} is supported")
    resample = values.get("resample", _BICUBIC)
    allowed = (_BICUBIC,) if video else tuple(int(r) for r in Image.Resampling)
    if isinstance(resample, bool) or resample not in allowed:
        raise CheckpointError(f"{where} has 'resample' = {resample!r}, expected one of {allowed}")
    minimum, maximum = _limits(values, where)
    settings = PixelSettings(
        patch_size=_count(values, "patch_size", where),
        temporal_patch_size=_count(values, "temporal_patch_size", where),
        merge_size=_count(values, "merge_size", where),
        min_pixels=minimum,
        max_pixels=maximum,
        mean=_triple(values, "image_mean", where),
        std=_triple(values, "image_std", where),
        rescale_factor=_positive(values, "rescale_factor", where, 1 / 255),
        resample=int(resample),
    )
    if min(settings.std) <= 0:
        raise CheckpointError(f"{where} has 'image_std' = {list(settings.std)}, expected positive numbers")
    if maximum < settings.factor**2:
        raise CheckpointError(
            f"{where} allows {maximum} pixels; one token alone has {settings.factor}×{settings.factor}"
        )
    return settings


def read_frame_cap(folder: Path, *, video_tokens: int = 768) -> FrameCap:
    """How a checkpoint's video preprocessor bounds frames; defaults are those of `Qwen3VLVideoProcessor`.

    Which frames of a video are looked at is chosen where it is decoded (`server/intake/frames.py`).

    Args:
        video_tokens: what `max_video_tokens` is by default.

    Raises:
        CheckpointError: a file is missing or a value is nonsense.
    """
    values, where = _section(folder, video=True)
    tokens = _count(values, "max_video_tokens", where, video_tokens)
    return FrameCap(values.get("cap_pixels_per_frame") is True, tokens)


def has_video_settings(folder: Path) -> bool:
    """Whether a checkpoint folder says how to prepare videos."""
    joint = folder / "processor_config.json"
    nested = joint.exists() and "video_processor" in read_json(joint)
    return nested or (folder / "video_preprocessor_config.json").exists()


def _section(folder: Path, video: bool) -> tuple[Mapping[str, Any], str]:
    """The settings and the file they are in. transformers 5 saves both into one processor_config.json.

    Qwen2.5-VL's folders have none for videos; transformers reads the images' then.
    """
    key, name = (
        ("video_processor", "video_preprocessor_config.json")
        if video
        else ("image_processor", "preprocessor_config.json")
    )
    joint = folder / "processor_config.json"
    if joint.exists():
        nested = read_json(joint).get(key)
        if isinstance(nested, dict):
            return nested, f"{joint}: {key}"
    if video and not (folder / name).exists():
        return _section(folder, video=False)
    return read_json(folder / name), str(folder / name)


def _limits(values: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Smallest and largest area: older files name them min_pixels and max_pixels, and those win."""
    size = values.get("size") or {}
    if not isinstance(size, dict):
        raise CheckpointError(f"{where} has 'size' = {size!r}, expected shortest_edge and longest_edge")
    found = {
        "shortest_edge": values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
        "longest_edge": values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
    }
    minimum, maximum = (_count(found, key, f"{where}: size") for key in found)
    if minimum > maximum:
        raise CheckpointError(f"{where} allows at least {minimum} and at most {maximum} pixels")
    return minimum, maximum


def _count(values: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where} has {key!r} = {value!r}, expected a positive whole number")
    return value


def _positive(values: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"{where} has {key!r} = {value!r}, expected a positive number")
    return float(value)


def _triple(values: Mapping[str, Any], key: str, where: str) -> tuple[float, float, float]:
    value = values.get(key)
    numbers = isinstance(value, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    )
    if not numbers or value is None or len(value) != 3:
        raise CheckpointError(f"{where} has {key!r} = {value!r}, expected three numbers")
    return float(value[0]), float(value[1]), float(value[2])
