"""Which encoder rows which tokens need."""

from hypothesis import given
from hypothesis import strategies as st

from snugvl.engine.admission import check_prompt
from snugvl.engine.request import CheckedPrompt
from tests.engine.toy import CONFIG, IMAGE, picture, request

ITEMS = (picture(1), picture(2, 2, 2), picture(3, 2, 4, t=2), picture(4, 4, 4))
PARTS = (9, ITEMS[0], ITEMS[1], 8, 8, ITEMS[2], ITEMS[3])


def prompt() -> CheckedPrompt:
    return check_prompt(request("a", *PARTS), CONFIG)


@given(start=st.integers(0, 40), end=st.integers(0, 40))
def test_vision_in_gives_the_rows_of_each_placeholder(start: int, end: int) -> None:
    here = prompt()
    rows = [(item, row) for item in ITEMS for row in range(len(item.patches) // 4)]
    before = sum(token == IMAGE for token in here.ids[:start])
    inside = sum(token == IMAGE for token in here.ids[start:end])
    got = [(part.item, row) for part in here.vision_in(start, end) for row in range(part.start, part.end)]
    assert got == rows[before : before + inside]
    assert [here.ids[i] for i in here.placeholders_in(start, end)] == [IMAGE] * inside


def test_a_prompt_without_images() -> None:
    here = check_prompt(request("a", 1, 2, 3), CONFIG)
    assert here.vision_in(0, 3) == []
    assert here.delta == 0
