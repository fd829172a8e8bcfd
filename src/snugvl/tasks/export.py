"""Detections of a batch of images in the formats that other tools read (COCO, YOLO and CSV), and as pictures.

COCO (https://cocodataset.org/#format-data): one JSON object, boxes as [x, y, width, height] in pixels.
YOLO (https://docs.ultralytics.com/datasets/detect/): a text file per image, a line per object with class
number, centre and size as fractions of the image; `classes.txt` names the classes, a line each.
CSV: a header, then a line per object.

The annotated picture has boxes with readable labels, at any image size. Lines and letters scale with it. One
whose longer side is under 480 pixels is enlarged by a whole factor first (pixels stay square), since no label
is readable on 64 pixels. A label goes where it hides least: above its box, else below, else inside, always
within the picture.
"""

import colorsys
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Final, cast

from PIL import Image, ImageDraw, ImageFont

from snugvl.core.folders import named
from snugvl.errors import InputError, WrongType
from snugvl.inputs.given import described
from snugvl.tasks.results import Box, Detections

Item = tuple[str, Detections]  # an image's name and what was found in it

CSV_HEADER = ("image", "image_width", "image_height", "label", "x1", "y1", "x2", "y2")
CLASSES_FILE = "classes.txt"
_SMALLEST_SIDE: Final = 480
_SMALLEST_FONT: Final = 9
_PALETTE: Final = (  # far apart in hue and lightness, the first ones the most
    (230, 25, 75),
    (0, 130, 255),
    (255, 225, 25),
    (60, 180, 75),
    (245, 130, 48),
    (145, 30, 180),
    (70, 240, 240),
    (240, 50, 230),
    (170, 110, 40),
    (0, 0, 128),
    (190, 255, 0),
    (250, 190, 212),
)
SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")

Colour = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # left, top, right, bottom; the last two outside


def categories(items: Iterable[Item], names: Sequence[str] = ()) -> list[str]:
    """Every label once: those asked for first, in their order, then others as they appear."""
    labels = (thing.label for _, found in items for thing in found.objects)
    return list(dict.fromkeys((*names, *labels)))


def coco(items: Sequence[Item], names: Sequence[str] = ()) -> str:
    """A COCO data set; ids start at 1, `file_name` is the image's name as given."""
    ids = {label: number for number, label in enumerate(categories(items, names), 1)}
    images = []
    annotations: list[dict[str, Any]] = []
    for image_id, (name, found) in enumerate(items, 1):
        images.append({"id": image_id, "file_name": name, "width": found.width, "height": found.height})
        for thing in found.objects:
            box = thing.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": ids[thing.label],
                    "bbox": [box.x1, box.y1, round(box.width, 2), round(box.height, 2)],
                    "area": round(box.area, 2),
                    "segmentation": [],
                    "iscrowd": 0,
                }
            )
    kinds = [{"id": number, "name": label, "supercategory": ""} for label, number in ids.items()]
    data = {"images": images, "annotations": annotations, "categories": kinds}
    return json.dumps(data, ensure_ascii=False) + "\n"


def yolo(items: Sequence[Item], names: Sequence[str] = ()) -> dict[str, str]:
    """File name → text: `classes.txt`, and one file per image, empty where nothing was found.

    Raises:
        InputError: two images would get the same file.
    """
    files = dict(zip(yolo_names([name for name, _ in items]), items, strict=True))
    numbers = {label: number for number, label in enumerate(categories(items, names))}
    texts = {CLASSES_FILE: "".join(f"{label}\n" for label in numbers)}
    for file, (_, found) in files.items():
        texts[file] = "".join(
            f"{numbers[thing.label]} {_fractions(thing.box, found)}\n" for thing in found.objects
        )
    return texts


def yolo_names(images: Sequence[str]) -> list[str]:
    """The label file of each image: its own name, ending in .txt. It is also called before a long batch.

    Raises:
        InputError: two images would get the same file, or an image the file of the classes.
    """
    owners = {CLASSES_FILE: "the list of classes"}
    for image in images:
        file = f"{PurePath(image).stem}.txt" if image != "-" else "stdin.txt"
        if file in owners:
            raise InputError(
                f"{image} and {owners[file]} would both be {file}; YOLO wants image names that differ"
            )
        owners[file] = image
    return [file for file in owners if file != CLASSES_FILE]


def table(items: Sequence[Item]) -> str:
    """CSV with a header; an image without objects has no line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for name, found in items:
        for thing in found.objects:
            box = thing.box
            writer.writerow((name, found.width, found.height, thing.label, box.x1, box.y1, box.x2, box.y2))
    return buffer.getvalue()


def _fractions(box: Box, found: Detections) -> str:
    x = (box.x1 + box.x2) / 2 / found.width
    y = (box.y1 + box.y2) / 2 / found.height
    return f"{x:.6f} {y:.6f} {box.width / found.width:.6f} {box.height / found.height:.6f}"


def annotate(image: Image.Image, detections: Detections) -> Image.Image:
    """A copy of `image` with the boxes and labels of `detections` on it; `image` stays as it is."""
    factor = max(1, math.ceil(_SMALLEST_SIDE / max(image.size)))
    size = (image.width * factor, image.height * factor)
    picture = image.convert("RGB").resize(size, Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(picture)
    line = max(2, round(math.sqrt(size[0] * size[1]) / 260))
    colours = colours_of(thing.label for thing in detections.objects)
    scale = size[0] / detections.width
    corners = [(thing.label, _scaled(thing.box, scale, size)) for thing in detections.objects]
    # Large boxes first, so that a small one inside stays in sight; labels last, over every line.
    for label, box in sorted(corners, key=lambda pair: -_area(pair[1])):
        _outline(pen, box, colours[label], line)
    taken: list[Rectangle] = []
    for label, box in corners:
        taken.append(_tag(pen, label, box, colours[label], size, taken))
    return picture


def save(picture: Image.Image, target: Path | BinaryIO) -> None:
    """Write `picture` to a path, in the format of its suffix, making the folder where it is missing; or to a
    file opened for writing, as PNG where its name has no picture's suffix."""
    if isinstance(target, Path):
        check_suffix(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        new = not target.exists()
        with named(target):
            try:
                picture.save(target)
            except OSError:
                if new:  # a part of a picture, which Pillow leaves where the disk is full
                    target.unlink(missing_ok=True)
                raise
    else:
        known = Path(str(getattr(target, "name", ""))).suffix.lower() in SUFFIXES
        picture.save(target, None if known else "PNG")


def target_of(given: object) -> Path | BinaryIO:
    """Where to save a picture: a path whose suffix was checked, or a file opened for writing.

    Raises:
        InputError: no picture can be written under that name.
        WrongType: it is neither a path nor a file opened for writing bytes.
    """
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        check_suffix(path)
        return path
    with suppress(AttributeError, ValueError):  # no file, or a closed one
        file = cast(BinaryIO, given)
        if file.writable() and not hasattr(file, "encoding"):
            return file
    raise WrongType(f"a picture is drawn to a path, or to a file opened with 'wb', not to {described(given)}")


def check_suffix(path: Path) -> None:
    """Raise InputError unless a picture can be written under that name, by its suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"can't draw to {path}: its name must end in one of {', '.join(SUFFIXES)}")


def colours_of(labels: Iterable[str]) -> dict[str, Colour]:
    """A colour per label, in order of appearance; beyond the palette, hues by the golden angle."""
    colours: dict[str, Colour] = {}
    for label in labels:
        if label not in colours:
            colours[label] = _colour(len(colours))
    return colours


def _colour(index: int) -> Colour:
    if index < len(_PALETTE):
        return _PALETTE[index]
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1.0, 0.55 + 0.15 * (index % 4), 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def _scaled(box: Box, scale: float, size: tuple[int, int]) -> Rectangle:
    """The box in whole pixels of the drawing, at least one wide and high."""
    left = min(round(box.x1 * scale), size[0] - 1)
    top = min(round(box.y1 * scale), size[1] - 1)
    return left, top, max(left + 1, round(box.x2 * scale)), max(top + 1, round(box.y2 * scale))


def _area(box: Rectangle) -> int:
    return max(0, box[2] - box[0]) * max(0, box[3] - box[1])


def _outline(pen: ImageDraw.ImageDraw, box: Rectangle, colour: Colour, line: int) -> None:
    """A line in the label's colour between two thin dark or light ones, seen on any background."""
    edge = _contrast(colour)
    thin = max(1, line // 4)
    left, top, right, bottom = box[0], box[1], box[2] - 1, box[3] - 1
    steps = ((0, thin, edge), (thin, line, colour), (thin + line, thin, edge))
    for inset, width, fill in steps:
        corners = (left + inset, top + inset, right - inset, bottom - inset)
        if corners[0] > corners[2] or corners[1] > corners[3]:
            return  # the box is smaller than its line
        pen.rectangle(corners, outline=fill, width=width)


def _tag(
    pen: ImageDraw.ImageDraw,
    label: str,
    box: Rectangle,
    colour: Colour,
    size: tuple[int, int],
    taken: list[Rectangle],
) -> Rectangle:
    """Write the label; returns its rectangle, empty where the picture has no room for one letter."""
    text, font, width, height = _fitted(pen, label, size)
    if not text:
        return (0, 0, 0, 0)
    left = min(max(box[0], 0), size[0] - width)
    inside = min(max(box[2] - width, 0), size[0] - width)
    rows = (box[1] - height, box[3], box[1], box[3] - height)
    places = [
        (x, y, x + width, y + height) for y in rows for x in (left, inside) if 0 <= y <= size[1] - height
    ] or [(left, 0, left + width, height)]
    place = min(places, key=lambda rectangle: sum(_overlap(rectangle, other) for other in taken))
    pen.rectangle((place[0], place[1], place[2] - 1, place[3] - 1), fill=colour)
    middle = (place[0] + width / 2, place[1] + height / 2)
    pen.text(middle, text, font=font, fill=_contrast(colour), anchor="mm")
    return place


def _fitted(
    pen: ImageDraw.ImageDraw, label: str, size: tuple[int, int]
) -> tuple[str, ImageFont.FreeTypeFont | ImageFont.ImageFont, int, int]:
    """(label, font, width, height of the tag), with smaller letters, then fewer, until it fits."""
    points = max(14, round(math.sqrt(size[0] * size[1]) / 36))
    text = label
    while text:
        font = ImageFont.load_default(points)
        padding = max(2, points // 4)
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font, anchor="mm")
        width, height = math.ceil(right - left) + 2 * padding, max(points, math.ceil(bottom - top)) + padding
        if width <= size[0] and height <= size[1]:
            return text, font, width, height
        if points > _SMALLEST_FONT:
            points = max(_SMALLEST_FONT, points * 3 // 4)
        elif text == "…":
            break
        else:
            text = text[: len(text.rstrip("…")) * 3 // 4] + "…"
    return "", ImageFont.load_default(_SMALLEST_FONT), 0, 0


def _overlap(one: Rectangle, other: Rectangle) -> int:
    return max(0, min(one[2], other[2]) - max(one[0], other[0])) * max(
        0, min(one[3], other[3]) - max(one[1], other[1])
    )


def _contrast(colour: Colour) -> Colour:
    """Black or white, whichever reads better on `colour` (Rec. 601 luma)."""
    luma = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return (0, 0, 0) if luma > 140 else (255, 255, 255)
