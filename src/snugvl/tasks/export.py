"""Detections of a batch of images in the formats that other tools read: COCO, YOLO and CSV.

COCO (https://cocodataset.org/#format-data): one JSON object, boxes as [x, y, width, height] in pixels.
YOLO (https://docs.ultralytics.com/datasets/detect/): a text file per image, a line per object with class
number, centre and size as fractions of the image; `classes.txt` names the classes, a line each.
CSV: a header, then a line per object.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from snugvl.errors import InputError
from snugvl.tasks.results import Box, Detections

Item = tuple[str, Detections]  # an image's name and what was found in it

CSV_HEADER = ("image", "image_width", "image_height", "label", "x1", "y1", "x2", "y2")
CLASSES_FILE = "classes.txt"


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
