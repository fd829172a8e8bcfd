"""Which encoder rows which tokens need."""

from hypothesis import given
from hypothesis import strategies as st

from snugvl.engine.admission import check_prompt
from snugvl.engine.sequence import Prompt
from tests.engine.toy import CONFIG, IMAGE, picture, request

ITEMS = (picture(1), picture(2, 2, 2), picture(3, 2, 4, t=2), picture(4, 4, 4))
PARTS = (9, ITEMS[0], ITEMS[1], 8, 8, ITEMS[2], ITEMS[3])


def prompt() -> Prompt:
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


def test_cut_item_is_the_one_a_boundary_stands_in() -> None:
    here = prompt()
    # ids: 9 | 42 ▒▒▒▒▒▒ 43 | 42 ▒ 43 | 8 8 | 42 ▒▒ 43 42 ▒▒ 43 | 42 ▒▒▒▒ 43
    cuts = [here.cut_item(computed) for computed in range(len(here) + 1)]
    numbers = [None if item is None else ITEMS.index(item) for item in cuts]
    assert numbers[:9] == [None, None, None, 0, 0, 0, 0, 0, None]
    assert numbers[9:16] == [None] * 7
    assert numbers[16:22] == [2] * 5 + [None], "a video stays between its frames"
    assert numbers[-5:] == [3, 3, 3, None, None]
    assert numbers.count(0) == 5
    assert numbers.count(1) == 0, "one row can't be cut"


def test_a_prompt_without_images() -> None:
    here = check_prompt(request("a", 1, 2, 3), CONFIG)
    assert here.vision_in(0, 3) == []
    assert here.cut_item(2) is None
    assert here.delta == 0
