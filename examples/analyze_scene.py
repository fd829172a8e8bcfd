"""Analyse a scene into a typed result: python examples/analyze_scene.py [--server URL] [PICTURE]"""

import argparse
from pathlib import Path

import snugvl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--server", help="a running `snugvl serve`, such as http://127.0.0.1:8000")
parser.add_argument("picture", nargs="?", type=Path, default=Path(__file__).parent / "images/tower.png")
options = parser.parse_args()

with snugvl.Client(options.server) if options.server else snugvl.load("pocket") as model:
    scene = model.scene(options.picture)

print(scene.summary)
print(f"setting: {scene.setting}")
for item in scene.objects:
    print(f"{item.count} x {item.name}: {', '.join(item.positions)}")
print(f"text: {', '.join(scene.text) or 'none'}")
print(f"relations: {'; '.join(scene.relations) or 'none'}")
