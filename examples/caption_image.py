"""Caption pictures: python examples/caption_image.py [PICTURE …]"""

import sys
from pathlib import Path

import snugvl

pictures = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parent / "images" / "shapes.png"]

with snugvl.load("pocket") as model:  # or a folder, or a downloaded Hub id
    for picture in pictures:
        print(f"{picture.name}: {model.caption(picture).text}")
        print(f"in detail: {model.caption(picture, detail='detailed').text}")
