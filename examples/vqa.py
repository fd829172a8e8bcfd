"""Ask about a picture, streaming the answer: python examples/vqa.py [--server URL] [PICTURE [QUESTION …]]"""

import argparse
from pathlib import Path

import snugvl

QUESTIONS = ["Is there a cat?", "Where is the dog?", "What color is the tree?"]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--server", help="a running `snugvl serve`, such as http://127.0.0.1:8000")
parser.add_argument("picture", nargs="?", type=Path, default=Path(__file__).parent / "images/garden.png")
parser.add_argument("questions", nargs="*", default=QUESTIONS)
options = parser.parse_args()

with snugvl.Client(options.server) if options.server else snugvl.load("pocket") as model:
    for question in options.questions:
        print(f"{question} ", end="")
        with model.stream_ask(options.picture, question) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print()
