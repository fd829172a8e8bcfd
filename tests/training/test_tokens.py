"""The tokenizer."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from training.pocket import language, questions, tasks, tokens, world

from tests.training.conftest import ROOT

PATH = ROOT / "src/snugvl/pocket/tokenizer.json"
ENCODE, REAL = tokens.Encoder(PATH), Tokenizer.from_file(str(PATH))


@given(st.text(max_size=60))
def test_any_text_comes_back_and_both_encoders_agree(text):
    if any(s in text for s in tokens.SPECIALS):
        return
    ids = REAL.encode(text).ids
    assert REAL.decode(ids) == text
    assert ENCODE(text) == ids


def test_words_of_the_world_stay_whole():
    words = [*world.SHAPES, *world.PICTOGRAMS, *world.COLORS]
    assert len(words) > 100
    for name in words:
        count = len(name.split(" "))
        assert len(ENCODE(f" {name}")) == count, name
        assert len(ENCODE(f'"label": "{name}"')) == len(ENCODE('"label": "x"')) - 1 + count, name


def test_numbers_of_boxes_are_single_and_printed_words_are_spelled():
    assert len(ENCODE("[123, 456, 789, 1000]")) == 5
    assert len(ENCODE('"CAT"')) == 5
    assert len(ENCODE('"4071"')) == 6


def test_exchanges_encode_alike(drawn):
    import random

    for scene in drawn[:40]:
        asker = questions.Asker(scene, random.Random(1))
        for e in (
            tasks.analysis(scene),
            tasks.detect_all(scene),
            tasks.caption(scene, True),
            tasks.detect_named(asker),
        ):
            for text in (e.question, e.answer):
                assert ENCODE(text) == REAL.encode(text).ids


def test_transformers_reads_the_same_tokenizer():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(PATH.parent)
    for text in (
        language.PROMPTS.SCENE,
        'Is "CAT" here? 日本',
        "<|im_start|>user\nHow many red circles?<|im_end|>\n",
    ):
        ids = REAL.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
