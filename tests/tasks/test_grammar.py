"""The grammars of scene and detect let through what models write, and nothing that can't be read."""

from pathlib import Path

import pytest
from PIL import Image

from snugvl.inputs.grammar import GrammarCompiler
from snugvl.inputs.tokenizer import Tokenizer
from snugvl.tasks import ask, conventions, detect, scene
from snugvl.tasks.results import Reply
from tests.masks import allowed_by
from tests.tasks.fake import BOXES, SCENE, FakeBackend

POCKET = Path(__file__).parents[2] / "src/snugvl/pocket"
VOCAB = 3598
CAT = '{"bbox_2d": [0, 12, 999, 1000], "label": "black cat"}'
PARTS = (
    '"summary": "A cat\'s nap."',
    '"setting": ""',
    '"objects": []',
    '"text": ["SALE"]',
    '"relations": []',
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(POCKET)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def follows(compiler: GrammarCompiler, tokenizer: Tokenizer, rule: conventions.Grammar, text: str) -> bool:
    state = compiler.compile(rule).start()
    for token in [*tokenizer.encode(text), min(tokenizer.eos_ids)]:
        if not allowed_by(state, VOCAB)[token]:
            return False
        state.accept(token)
    return True


GOOD_BOXES = [
    "[]",
    "```json\n[]\n```",
    BOXES,
    f"[{CAT}]",
    f"```json\n[\n\t{CAT},\n\t{CAT.replace('black', 'red')}\n]\n```",
    '```json\n[\n  {\n    "bbox_2d": [1, 2, 3, 4],\n    "label": "cat"\n  }\n]\n```',
    '[{"bbox_2d":[1,2,3,4],"label":"Käse \\"A\\""}]',
]
BAD_BOXES = [
    "",
    "There are none.",
    "```\n[]\n```",
    f"[{CAT}] and more",
    '[{"bbox_2d": [1, 2, 3], "label": "x"}]',
    '[{"bbox_2d": [1, 2, 3, 1001], "label": "x"}]',
    '[{"bbox_2d": [1, 2, 3, -1], "label": "x"}]',
    '[{"bbox_2d": [1, 2, 3, 4]}]',
    '[{"bbox_2d": [1,  2, 3, 4], "label": "x"}]',
    "[" + "\n" * 3 + "]",
]
GOOD_SCENES = [
    SCENE,
    "{" + ", ".join(PARTS) + "}",
    "```json\n{\n  " + ",\n  ".join(PARTS) + "\n}\n```",
    "{" + ",".join(PARTS).replace(": ", ":") + "}",
    "{\n\t" + ",\n\t".join(PARTS) + "\n}",
    "{\n    " + ",\n    ".join(PARTS).replace('["SALE"]', '[\n        "SALE"\n    ]') + "\n}",
]
BAD_SCENES = [
    "{}",
    "A cat.",
    "{" + ", ".join(PARTS[:4]) + "}",
    "{" + ", ".join(reversed(PARTS)) + "}",
    SCENE.replace('"count": 2', '"count": 0'),
    SCENE.replace('"count": 2', '"count": "two"'),
    SCENE + " ",
    "{" + ",".join(PARTS) + "}",  # two styles
    "{\n  " + ", ".join(PARTS) + "\n}",
    "{\n  " + ",\n  ".join(PARTS) + "}",
]


@pytest.mark.parametrize("text", GOOD_BOXES)
def test_boxes_it_allows_are_read(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    assert follows(compiler, tokenizer, conventions.BOXES, text)
    capabilities = FakeBackend().capabilities
    found = detect.result(Reply(text=text, finish_reason="stop"), (100, 100), [], capabilities)
    assert len(found.objects) == text.count("bbox_2d")


@pytest.mark.parametrize("text", BAD_BOXES)
def test_boxes_it_forbids(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    assert not follows(compiler, tokenizer, conventions.BOXES, text)


@pytest.mark.parametrize("text", GOOD_SCENES)
def test_scenes_it_allows_are_read(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    assert follows(compiler, tokenizer, conventions.SCENE, text)
    assert scene.result(Reply(text=text, finish_reason="stop")).text == ("SALE",)


@pytest.mark.parametrize("text", BAD_SCENES)
def test_scenes_it_forbids(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    assert not follows(compiler, tokenizer, conventions.SCENE, text)


def test_which_tasks_have_a_grammar() -> None:
    image, capabilities = Image.new("RGB", (9, 9)), FakeBackend().capabilities
    assert scene.request(image, capabilities).grammar == conventions.SCENE
    assert detect.request(image, ["cup"], capabilities).grammar == conventions.BOXES
    assert ask.caption_request(image, capabilities, detail="short").grammar is None
    assert ask.request([image], "What?", capabilities).grammar is None
