"""What is called from several threads, hammered from eight at once, in a process of its own: a library that
keeps global state fails at random there, or ends the process.

    library         what it promises                             where threads call it
    Pillow          one image in one thread; plugins have none   a batch's readers, preparers, `detect --draw`
    pi-heif         libheif: contexts are independent            the same
    PyAV (FFmpeg)   contexts are independent; its log isn't,     the same
                    and is switched off (`frames.preload`)
    tokenizers      Rust; settings are shared, and never set     preparers
    llguidance      a matcher belongs to one request             preparers, the executor of masks
    jsonschema_rs   validators are immutable                     processes of trials; one thread each
    NVML            thread-safe; pynvml counts its starts        servers' gauges, `top`
    PDFium          none at all: one thread (inputs/pdf.py)      tests/cli/test_pdf.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.draws import SHARE
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
START = f"""
ROUNDS = {round(40 * SHARE)}
"""
START += """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
gate = Barrier(8)
def hammer(work):
    def thread(number):
        gate.wait()  # all begin with the library untouched
        return [work(number, turn) for turn in range(ROUNDS)]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(thread, range(8)))
    for row in rows:
        if row != rows[0]:
            sys.exit(f"threads differ: {row} {rows[0]}")
"""

FILES = """
import hashlib
from tests.phone_files import PICTURES
names = ("phone.jpg", "still.heic", "turned.heic", "ten.heic", "still.avif", "scan.tif", "camera.mpo")
files = [PICTURES[name]() for name in names]
def work(number, turn):
    from snugvl.inputs.image import open_image
    found = [hashlib.sha256(open_image(data).tobytes()).hexdigest() for data in files]
    return found
hammer(work)
"""
FILMS = f"""
ROUNDS = {round(10 * SHARE)}
"""
FILMS += """
import hashlib
from tests.phone_files import film, moving, sequence
files = [film(), film("mov", "libx265"), sequence(b"msf1"), moving("GIF"), moving("WEBP")]
def work(number, turn):
    from snugvl.inputs.frames import open_video
    videos = [open_video(data, "film") for data in files]
    return [hashlib.sha256(frame.tobytes()).hexdigest() for video in videos for frame in video.frames]
hammer(work)
"""
DRAWING = """
from PIL import Image
import hashlib
from snugvl.tasks.results import Box, Detection, Detections
things = tuple(Detection(label=f"thing {n}", box=Box(x1=n, y1=n, x2=90 + n, y2=60 + n)) for n in range(9))
found = Detections(width=400, height=300, objects=things)
picture = Image.new("RGB", (400, 300), "white")
def work(number, turn):
    return hashlib.sha256(found.draw(picture).tobytes()).hexdigest()
hammer(work)
"""
TOKENS = """
from snugvl.checkpoint.locate import locate
from snugvl.inputs.tokenizer import Tokenizer
tokenizer = Tokenizer.from_folder(locate("pocket"))
texts = [f"a red circle {n} above two blue squares " * (1 + 20 * (n % 3)) for n in range(12)]
def work(number, turn):
    return [tuple(tokenizer.encode(text)) for text in texts]
hammer(work)
"""
SCHEMAS = """
import jsonschema_rs
schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 2}}, "required": ["n"]}
shared = jsonschema_rs.validator_for(schema)
def work(number, turn):
    return shared.is_valid({"n": turn}), jsonschema_rs.validator_for(schema).is_valid({})
hammer(work)
"""
GRAMMARS = """
import llguidance
shared = llguidance.LLTokenizer("byte")
schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
def work(number, turn):
    matcher = llguidance.LLMatcher(shared, grammar)
    taken = [matcher.consume_token(byte) for byte in b'{"n": 12}']
    return all(taken), matcher.is_error()
hammer(work)
"""
NVML = """
import pynvml
def work(number, turn):
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return type(error).__name__
    try:
        return pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
hammer(work)
"""


@pytest.mark.parametrize(
    "code",
    [FILES, FILMS, DRAWING, TOKENS, SCHEMAS, GRAMMARS, NVML],
    ids=["pictures", "films", "drawing", "tokens", "schemas", "grammars", "nvml"],
)
@pytest.mark.sample("pictures", "films", "drawing", "schemas", "grammars", "nvml")
def test_eight_threads_at_once(code: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", START + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
