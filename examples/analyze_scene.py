"""Analyse a scene into a typed result: python examples/analyze_scene.py [PICTURE]"""

import sys
from pathlib import Path

import snugvl

picture = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images" / "tower.png"

with snugvl.load("pocket") as model:
    scene = model.scene(picture)

print(scene.summary)
print(f"setting: {scene.setting}")
for item in scene.objects:
    print(f"{item.count} x {item.name}: {', '.join(item.positions)}")
print(f"text: {', '.join(scene.text) or 'none'}")
print(f"relations: {'; '.join(scene.relations) or 'none'}")
