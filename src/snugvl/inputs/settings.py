"""How a checkpoint wants pictures and videos prepared, read from its own files and checked.

A value that would change pixels and that isn't implemented is refused by name; nothing is guessed except
the defaults that Hugging Face's own processors have.
"""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from snugvl.checkpoint.section import Section, finite, read_json, shown
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
    section = _section(folder, video)
    values, where = section.values, section.where
    for key, wanted in _FIXED.items():
        if values.get(key) not in (None, wanted):
            raise CheckpointError(f"{where} has {key!r} = {shown(values[key])}; only {wanted} is supported")
    resample = values.get("resample", _BICUBIC)
    allowed = (_BICUBIC,) if video else tuple(int(r) for r in Image.Resampling)
    if isinstance(resample, bool) or resample not in allowed:
        raise CheckpointError(f"{where} has 'resample' = {shown(resample)}, expected one of {allowed}")
    minimum, maximum = _limits(section)
    settings = PixelSettings(
        patch_size=section.count("patch_size"),
        temporal_patch_size=section.count("temporal_patch_size"),
        merge_size=section.count("merge_size"),
        min_pixels=minimum,
        max_pixels=maximum,
        mean=_triple(section, "image_mean"),
        std=_triple(section, "image_std"),
        rescale_factor=section.get("rescale_factor", float, 1 / 255),
        resample=int(resample),
    )
    if min(settings.std) <= 0:
        raise CheckpointError(f"{where} has 'image_std' = {list(settings.std)}, expected positive numbers")
    if settings.rescale_factor <= 0:
        raise CheckpointError(
            f"{where} has 'rescale_factor' = {settings.rescale_factor:g}, expected a positive number"
        )
    if maximum < settings.factor**2:
        raise CheckpointError(
            f"{where} allows {maximum} pixels; one token alone has {settings.factor}×{settings.factor}"
        )
    return settings


def read_frame_cap(folder: Path, *, video_tokens: int = 768) -> FrameCap:
    """How a checkpoint's video preprocessor bounds frames; defaults are those of `Qwen3VLVideoProcessor`.

    Which frames of a video are looked at is chosen where it is decoded (`inputs/frames.py`).

    Args:
        video_tokens: what `max_video_tokens` is by default.

    Raises:
        CheckpointError: a file is missing or a value is nonsense.
    """
    section = _section(folder, video=True)
    tokens = section.count("max_video_tokens", video_tokens)
    return FrameCap(section.values.get("cap_pixels_per_frame") is True, tokens)


def has_video_settings(folder: Path) -> bool:
    """Whether a checkpoint folder says how to prepare videos."""
    joint = folder / "processor_config.json"
    nested = joint.exists() and "video_processor" in read_json(joint)
    return nested or (folder / "video_preprocessor_config.json").exists()


def _section(folder: Path, video: bool) -> Section:
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
            return Section(nested, f"{joint}: {key}")
    if video and not (folder / name).exists():
        return _section(folder, video=False)
    return Section(read_json(folder / name), str(folder / name))


def _limits(section: Section) -> tuple[int, int]:
    """Smallest and largest area: older files name them min_pixels and max_pixels, and those win."""
    values, size = section.values, section.get("size", dict, {})
    found = {
        "shortest_edge": values.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
        "longest_edge": values.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
    }
    limits = Section(found, f"{section.where}: size")
    minimum, maximum = limits.count("shortest_edge"), limits.count("longest_edge")
    if minimum > maximum:
        raise CheckpointError(
            f"{section.where} asks for at least {minimum:,} and at most {maximum:,} pixels, which contradict "
            "each other; download the file again"
        )
    return minimum, maximum


def _triple(section: Section, key: str) -> tuple[float, float, float]:
    value = section.get(key, list)
    numbers = [each for each in map(finite, value) if each is not None]
    if len(value) != 3 or len(numbers) != 3:
        raise CheckpointError(f"{section.where} has {key!r} = {shown(value)}, expected three numbers")
    return numbers[0], numbers[1], numbers[2]
