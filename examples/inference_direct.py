"""A model in this process, no server: python examples/inference_direct.py [--backend NAME] [MODEL [PICTURE]]

vLLM is a server of its own: examples/start_server.py --backend vllm.
"""

import argparse
from pathlib import Path

import snugvl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--backend", choices=["auto", "native", "transformers"], default="auto")
parser.add_argument("model", nargs="?", default="pocket", help="pocket, a folder, or a downloaded Hub id")
parser.add_argument("picture", nargs="?", type=Path, default=Path(__file__).parent / "images/shapes.png")
options = parser.parse_args()

with snugvl.load(options.model, backend=options.backend) as model:
    print(f"{model.capabilities.model} on {model.capabilities.engine}")
    print(model.caption(options.picture).text)
    with model.stream_ask(options.picture, "How many squares are there?") as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print()
