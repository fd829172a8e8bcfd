"""Find objects and draw their boxes: python examples/detect_objects.py [--server URL] [PICTURE [NAME …]]"""

import argparse
from pathlib import Path

from PIL import Image

import snugvl
from snugvl.tasks.export import annotate, save

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--server", help="a running `snugvl serve`, such as http://127.0.0.1:8000")
parser.add_argument("picture", nargs="?", type=Path, default=Path(__file__).parent / "images/shapes.png")
parser.add_argument("names", nargs="*", help="what to look for; by default everything")
options = parser.parse_args()

with snugvl.Client(options.server) if options.server else snugvl.load("pocket") as model:
    found = model.detect(options.picture, options.names)

for item in found.objects:
    print(f"{item.label}: ({item.box.x1:.0f}, {item.box.y1:.0f}) to ({item.box.x2:.0f}, {item.box.y2:.0f})")

output = Path(f"{options.picture.stem}-boxes.png")
save(annotate(Image.open(options.picture), found), output)
print(f"drawn: {output}")
