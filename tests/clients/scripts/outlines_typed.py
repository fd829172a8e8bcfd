"""outlines: its OpenAI, vLLM and Ollama models with a picture. It has no tools.

Packages: outlines openai ollama
Ran: a picture; a typed answer about a picture with each of the three; a choice through vLLM's
`structured_outputs`
"""

from typing import Literal

import about
import ollama
import outlines
from openai import OpenAI
from outlines.inputs import Image
from PIL import Image as Picture
from pydantic import BaseModel


class Shape(BaseModel):
    color: Literal["red", "green", "blue"]
    count: Literal[0, 1, 2, 3]


image = Picture.open(about.PICTURE)
openai = OpenAI(base_url=f"{about.SERVER}/v1", api_key="none", max_retries=0)
models = [
    outlines.from_openai(openai, "pocket"),
    outlines.from_vllm(openai, "pocket"),
    outlines.from_ollama(ollama.Client(about.SERVER), "pocket"),
]
first = models[0]([about.FIRST, Image(image)])
typed = [Shape.model_validate_json(model([about.STRUCTURE, Image(image)], Shape)) for model in models]
assert models[1]([about.STRUCTURE, Image(image)], Literal["red", "green"]) in ("red", "green")
about.report_loop(first=first, turns=[], structured=typed[0].model_dump())
