"""Ask about a picture, streaming the answer: python examples/vqa.py [PICTURE [QUESTION …]]"""

import sys
from pathlib import Path

import snugvl

picture = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images" / "garden.png"
questions = sys.argv[2:] or ["What animals are there?", "Where is the car?", "Is there a tree?"]

with snugvl.load("pocket") as model:
    for question in questions:
        print(f"{question} ", end="")
        with model.stream_ask(picture, question) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print()
