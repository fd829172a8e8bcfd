"""The numbers of a step: each token's id, position and slot, and what fills up a larger shape."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from snugvl.engine.admission import check_prompt
from snugvl.engine.batch import Numbers, Shape, numbers_of, pack, shape_of
from snugvl.engine.scheduler import Chunk
from snugvl.engine.sequence import Sequence
from tests.draws import draws
from tests.engine.toy import CONFIG, IMAGE, picture, request

BLOCK = 4


def sequence(seed: int, generated: int) -> Sequence:
    """Text, a picture, text, and some tokens of an answer; blocks anywhere."""
    source = random.Random(seed)
    item = request("a", *range(1, 2 + seed), picture(seed), *range(5, 12))
    made = Sequence(item, check_prompt(item, CONFIG), (seed, 0), 99, source, frozenset(), True, False)
    made.generated = [source.randrange(40) for _ in range(generated)]
    made.table = source.sample(range(1, 90), -(-made.length // BLOCK))
    made.slot = seed
    return made


def packed(chunks: list[Chunk], shape: Shape) -> Numbers[torch.Tensor]:
    return numbers_of(pack(chunks, shape, BLOCK), shape)


spans = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6), st.randoms()), min_size=1, max_size=4)


@given(spans)
@draws(40)
def test_every_number_is_that_of_its_token(spans: list[tuple[int, int, random.Random]]) -> None:
    chunks = []
    for seed, generated, source in spans:
        made = sequence(seed, generated)
        start = source.randrange(made.length)
        chunks.append(Chunk(made, start, source.randint(start + 1, made.length)))
    found = packed(chunks, shape_of(chunks))
    tokens = [(chunk, place) for chunk in chunks for place in range(chunk.start, chunk.end)]
    known = {id(chunk): [*chunk.sequence.prompt.ids, *chunk.sequence.generated] for chunk in chunks}
    assert found.ids.tolist() == [known[id(chunk)][place] for chunk, place in tokens]
    for (chunk, place), position in zip(tokens, found.positions.T.tolist(), strict=True):
        prompt = chunk.sequence.prompt
        inside = place < len(prompt)
        assert position == (prompt.positions[:, place].tolist() if inside else [place + prompt.delta] * 3)
    slots = [chunk.sequence.table[place // BLOCK] * BLOCK + place % BLOCK for chunk, place in tokens]
    assert found.slots.tolist() == slots
    assert found.pictured.tolist() == [
        row for row, (chunk, place) in enumerate(tokens) if known[id(chunk)][place] == IMAGE
    ]
    ends = torch.tensor([chunk.end - chunk.start for chunk in chunks]).cumsum(0).tolist()
    assert found.logit_rows.tolist() == [
        e - 1 for e, chunk in zip(ends, chunks, strict=True) if chunk.samples
    ]
    assert found.starts.tolist() == [0, *ends]
    assert found.lengths.tolist() == [chunk.end for chunk in chunks]
    assert found.state_slots.tolist() == [chunk.sequence.slot for chunk in chunks]
    for chunk, table in zip(chunks, found.tables.tolist(), strict=True):
        assert table == chunk.sequence.table + [0] * (len(table) - len(chunk.sequence.table))


def test_what_fills_up_a_shape_is_written_nowhere_and_belongs_to_nobody() -> None:
    chunks = [Chunk(made := sequence(3, 2), 4, made.length), Chunk(sequence(1, 0), 0, 5)]
    exact = shape_of(chunks)
    shape = exact._replace(tokens=64, sequences=8, logits=8, pictured=64)
    found, right = packed(chunks, shape), packed(chunks, exact)
    assert found.ids[: exact.tokens].tolist() == right.ids.tolist()
    assert torch.equal(found.positions[:, : exact.tokens], right.positions)
    assert found.slots.tolist() == right.slots.tolist() + [-1] * (64 - exact.tokens)
    assert found.starts.tolist() == right.starts.tolist() + [exact.tokens] * 6
    assert found.lengths.tolist() == right.lengths.tolist() + [0] * 6
    assert found.logit_rows[: exact.logits].tolist() == right.logit_rows.tolist()
    assert found.pictured[: exact.pictured].tolist() == right.pictured.tolist()


def test_kernels_see_addresses_and_widths_that_sixteen_divides() -> None:
    """Triton compiles another kernel for others: a pause of a second in the middle of an answer."""
    for count in (1, 2, 3):
        chunks = [Chunk(made := sequence(i, i), 3, made.length) for i in range(count)]
        found = packed(chunks, shape_of(chunks))
        assert all((part.data_ptr() - found.ids.data_ptr()) % 16 == 0 for part in found)
        assert found.tables.shape[1] % 16 == 0
        assert found.starts.dtype == found.lengths.dtype == torch.int32
