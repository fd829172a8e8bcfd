"""The annotated picture, looked at pixel by pixel."""

from pathlib import Path

import pytest
from PIL import Image, ImageChops

from snugvl.errors import InputError
from snugvl.tasks import export
from snugvl.tasks.results import Box, Detection, Detections

GREY = (127, 127, 127)


def detections(size: tuple[int, int], *things: tuple[str, tuple[float, float, float, float]]) -> Detections:
    """Boxes given in fractions of the image."""
    width, height = size
    objects = tuple(
        Detection(label=label, box=Box(x1=a * width, y1=b * height, x2=c * width, y2=d * height))
        for label, (a, b, c, d) in things
    )
    return Detections(width=width, height=height, objects=objects)


def changed(before: Image.Image, after: Image.Image) -> tuple[int, int, int, int]:
    """The rectangle in which two pictures differ."""
    box = ImageChops.difference(before, after).getbbox()
    assert box is not None
    return box


@pytest.mark.parametrize(
    "size", [(64, 64), (40, 300), (1000, 30), (480, 480), (1920, 1080), (1, 1), (1, 900)]
)
def test_any_size_of_image_can_be_annotated(size: tuple[int, int]) -> None:
    things = [(f"thing number {n}", (n / 20, n / 20, n / 20 + 0.3, n / 20 + 0.3)) for n in range(14)]
    image = Image.new("RGB", size, GREY)
    picture = export.annotate(image, detections(size, *things, ("x" * 300, (0, 0, 1, 1))))
    factor = picture.width // size[0]
    assert picture.size == (size[0] * factor, size[1] * factor)
    assert factor == 1 or max(picture.size) >= 480
    assert image.getextrema() == ((127, 127),) * 3  # the original is untouched


def test_the_box_is_drawn_where_it_is() -> None:
    size = (800, 600)
    image = Image.new("RGB", size, GREY)
    picture = export.annotate(image, detections(size, ("", (0.25, 0.5, 0.5, 0.75))))
    assert changed(image, picture) == (200, 300, 400, 450)  # no label, so nothing else
    assert picture.getpixel((300, 375)) == GREY  # hollow


@pytest.mark.parametrize(
    "corner", [(0, 0, 0.1, 0.1), (0.9, 0, 1, 0.1), (0, 0.9, 0.1, 1), (0.9, 0.9, 1, 1), (0, 0, 1, 1)]
)
def test_a_label_stays_in_the_picture_and_is_readable(corner: tuple[float, float, float, float]) -> None:
    size = (800, 600)
    image = Image.new("RGB", size, GREY)
    bare = export.annotate(image, detections(size, ("", corner)))
    picture = export.annotate(image, detections(size, ("red circle", corner)))
    left, top, right, bottom = changed(bare, picture)
    assert right - left > 60
    assert bottom - top > 14
    tag = picture.crop((left, top, right, bottom))
    colours = {colour: count for count, colour in tag.getcolors(100_000) or []}
    assert colours[export.colours_of(["red circle"])["red circle"]] > 0.4 * tag.width * tag.height
    assert (255, 255, 255) in colours  # letters in full contrast
    # The whole tag is there: a free margin all around means no letter was cut off by the picture's edge.
    column = {tag.getpixel((tag.width - 1, y)) for y in range(tag.height // 4, tag.height * 3 // 4)}
    assert (255, 255, 255) not in column


def test_labels_avoid_each_other() -> None:
    size = (800, 600)
    image = Image.new("RGB", size, GREY)
    same = (0.3, 0.3, 0.7, 0.7)
    picture = export.annotate(image, detections(size, ("cup", same), ("mug", same), ("jar", same)))
    for label, colour in export.colours_of(["cup", "mug", "jar"]).items():
        count = sum(number for number, seen in picture.getcolors(100_000) or [] if seen == colour)
        assert count > 300, f"the tag of {label} is hidden"


def test_labels_have_colours_of_their_own() -> None:
    colours = export.colours_of([f"label {n % 40}" for n in range(80)])
    assert len(set(colours.values())) == len(colours) == 40
    assert export.colours_of(["a", "b"]) == {"a": colours["label 0"], "b": colours["label 1"]}


def test_saving_makes_the_folder_and_refuses_names_that_are_no_picture(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8))
    for suffix in export.SUFFIXES:
        path = tmp_path / "new" / "deep" / f"a{suffix.upper()}"
        export.save(picture, path)
        with Image.open(path) as saved:
            assert saved.size == (8, 8)
    for name in ("a", "a.txt", "a.svg"):
        with pytest.raises(InputError, match="must end in"):
            export.save(picture, tmp_path / name)
