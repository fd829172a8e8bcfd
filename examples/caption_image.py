"""Caption pictures, here or on a server: python examples/caption_image.py [--server URL] [PICTURE …]"""

import argparse
from pathlib import Path

import snugvl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--server", help="a running `snugvl serve`, such as http://127.0.0.1:8000")
parser.add_argument("pictures", nargs="*", type=Path, default=[Path(__file__).parent / "images/shapes.png"])
options = parser.parse_args()

# "pocket", or a folder, or a downloaded Hub id
with snugvl.Client(options.server) if options.server else snugvl.load("pocket") as model:
    for picture in options.pictures:
        print(f"{picture.name}: {model.caption(picture).text}")
        print(f"in detail: {model.caption(picture, detail='detailed').text}")
