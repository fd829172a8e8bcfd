"""Find objects and draw their boxes: python examples/detect_objects.py [PICTURE [NAME …]]"""

import sys
from pathlib import Path

from PIL import Image

import snugvl
from snugvl.tasks.draw import annotate, save

picture = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images" / "shapes.png"

with snugvl.load("pocket") as model:
    found = model.detect(picture, sys.argv[2:])  # no names: every object

for item in found.objects:
    print(f"{item.label}: ({item.box.x1:.0f}, {item.box.y1:.0f}) to ({item.box.x2:.0f}, {item.box.y2:.0f})")

output = Path(f"{picture.stem}-boxes.png")
save(annotate(Image.open(picture), found), output)
print(f"drawn: {output}")
