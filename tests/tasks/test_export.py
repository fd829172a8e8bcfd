"""COCO, YOLO and CSV, read back as their users read them."""

import csv
import io
import json

import pytest

from snugvl.errors import InputError
from snugvl.tasks import export
from snugvl.tasks.results import Box, Detection, Detections

CUP = Detection(label="cup", box=Box(x1=10, y1=20, x2=50, y2=40))
ODD = Detection(label='a "tea", pot\u00e9', box=Box(x1=0, y1=0, x2=100.5, y2=80))
ITEMS = [
    ("in/a.png", Detections(width=200, height=80, objects=(CUP, ODD))),
    ("b.jpg", Detections(width=64, height=64)),
    ("c.png", Detections(width=100, height=100, objects=(CUP,))),
]


def test_coco_is_a_data_set() -> None:
    data = json.loads(export.coco(ITEMS, ["plate", "cup"]))
    assert [(image["id"], image["file_name"], image["width"]) for image in data["images"]] == [
        (1, "in/a.png", 200),
        (2, "b.jpg", 64),
        (3, "c.png", 100),
    ]
    assert [category["name"] for category in data["categories"]] == ["plate", "cup", 'a "tea", poté']
    ids = [category["id"] for category in data["categories"]]
    assert ids == [1, 2, 3]
    for annotation in data["annotations"]:
        assert annotation["category_id"] in ids
        assert annotation["area"] == annotation["bbox"][2] * annotation["bbox"][3]
    assert data["annotations"][0]["bbox"] == [10, 20, 40, 20]
    assert [annotation["id"] for annotation in data["annotations"]] == [1, 2, 3]
    assert [annotation["image_id"] for annotation in data["annotations"]] == [1, 1, 3]


def test_yolo_has_a_file_per_image_and_the_classes() -> None:
    files = export.yolo(ITEMS)
    assert set(files) == {"classes.txt", "a.txt", "b.txt", "c.txt"}
    assert files["classes.txt"].splitlines() == ["cup", 'a "tea", poté']
    assert files["a.txt"].splitlines()[0] == "0 0.150000 0.375000 0.200000 0.250000"
    assert files["b.txt"] == ""
    for line in (files["a.txt"] + files["c.txt"]).splitlines():
        number, *fractions = line.split()
        assert int(number) < 2
        assert all(0 <= float(fraction) <= 1 for fraction in fractions)


@pytest.mark.parametrize("names", [["a/x.png", "b/x.png"], ["x.png", "x.jpg"], ["classes.png"]])
def test_yolo_refuses_images_with_one_name(names: list[str]) -> None:
    with pytest.raises(InputError, match="would both be"):
        export.yolo_names(names)


def test_csv_has_a_header_and_quotes() -> None:
    rows = list(csv.DictReader(io.StringIO(export.table(ITEMS))))
    assert [row["label"] for row in rows] == ["cup", 'a "tea", poté', "cup"]
    assert (rows[1]["x2"], rows[0]["image"], rows[0]["image_width"]) == ("100.5", "in/a.png", "200")
    assert export.table([]).split() == [",".join(export.CSV_HEADER)]
