"""What stands around a decode's network, and what its network begins with, against plain torch."""

import pytest
import torch

from snugvl.checkpoint.architecture import LongRope, Rope, YarnScaling
from snugvl.engine.batch import likeliest
from snugvl.engine.graphs import decode as graphs
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.kernels import decode_step
from snugvl.layers.kernels.rows import lookup, rotation
from snugvl.layers.linear import Linear
from snugvl.models import rope as module
from snugvl.models.rope import rotation_of

CPU = torch.device("cpu")
INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("block", [16, 32])
def test_places(block: int, device: torch.device) -> None:
    """The first and the last token of a block, and rows that are nobody's."""
    lengths = torch.tensor([1, block, block + 1, 0, 3 * block - 1, 0], dtype=torch.int32)
    deltas = torch.tensor([0, -7, 4, 9, -(2**33), 1])
    tables = torch.randint(0, 2**31 // block, (6, 5), dtype=torch.int32)
    wanted = graphs.places(lengths, deltas, tables, block)
    ours = decode_step.places(lengths.to(device), deltas.to(device), tables.to(device), block)
    for right, mine in zip(wanted, ours, strict=True):
        assert torch.equal(mine.cpu(), right)
    assert wanted[1].tolist()[3] == wanted[1].tolist()[5] == -1


@pytest.mark.parametrize("width", [1, 16, 300])
@pytest.mark.parametrize("new", [[3], [1, 4, 1], [2, 0, 0], [5, 1, 0]])
def test_tokens_are_set_apart(new: list[int], width: int, device: torch.device) -> None:
    """Of several sequences, some that have none, and tokens behind them that are nobody's."""
    ends = torch.tensor(new).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int()
    lengths = torch.tensor([40 * (1 + index) if count else 0 for index, count in enumerate(new)]).int()
    tables = torch.randint(0, 1000, (len(new), width), dtype=torch.int32)
    tokens = 8
    slots = torch.zeros(tokens, dtype=torch.int64)
    counts = tuple(new)
    made = AttentionMetadata(counts, counts, slots, tables, 16, starts=starts, lengths=lengths)
    wanted = made.token_by_token(tokens).apart
    assert wanted is not None
    assert wanted.lengths is not None
    seen, own = decode_step.apart(starts.to(device), lengths.to(device), tables.to(device), tokens)
    assert torch.equal(seen.cpu(), wanted.lengths)
    assert torch.equal(own.cpu(), wanted.block_tables)
    assert seen.tolist()[sum(new) :] == [0] * (tokens - sum(new))


def rows(vocabulary: int) -> torch.Tensor:
    """Scores with ties, in one part and across parts, and rows that are broken."""
    scores = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    last, middle = vocabulary - 1, vocabulary // 2
    scores[1, [2, 3, last]] = 9.0
    scores[2, [middle, last]] = 9.0
    scores[3, middle] = NAN
    scores[4, last] = INFINITE
    scores[5] = -INFINITE
    scores[6] = -INFINITE
    scores[6, last] = -5.0
    scores[7, 0] = -NAN
    scores[8] = -3.0
    return scores


@pytest.mark.parametrize("vocabulary", [7, decode_step.PART, 2 * decode_step.PART + 3])
def test_the_likeliest_tokens(vocabulary: int, device: torch.device) -> None:
    scores = rows(vocabulary)
    lengths = torch.tensor([1, 0, 5, 7, 0, 2, 3, 4, 2**20], dtype=torch.int32)
    made: list[list[torch.Tensor]] = []
    for choose, place in ((graphs.choose, CPU), (decode_step.choose, device)):
        tokens, following = (torch.full((9,), 99, device=place) for _ in range(2))
        grown = lengths.clone().to(place)
        choose(scores.to(place), tokens, following, grown)
        made.append([part.cpu() for part in (tokens, following, grown)])
    (right, other, grown), (tokens, following, ours) = made
    assert torch.equal(tokens, right)
    whole = right >= 0
    assert whole.tolist() == [True, True, True, False, False, False, True, False, True]
    assert torch.equal(following[whole], other[whole])
    assert ((following >= 0) & (following < vocabulary)).all(), "the next step reads an embedding of it"
    assert torch.equal(ours, grown)
    assert tokens[[1, 8]].tolist() == [2, 0], "the first of equals"


@pytest.mark.parametrize("vocabulary", [7, decode_step.PART, 2 * decode_step.PART + 3])
def test_the_likeliest_allowed_tokens(vocabulary: int, device: torch.device) -> None:
    """Whatever is best may be forbidden; a row that is broken stays so, though what broke it is forbidden."""
    scores = rows(vocabulary)
    bits = torch.randint(
        -(2**31), 2**31, (9, (vocabulary + 31) // 32), generator=torch.Generator().manual_seed(1)
    )
    bits = bits.to(torch.int32)
    bits[2] = 0
    bits[4, -1] = 0  # where it is infinite
    bits[6] = 0
    bits[6, -1] = 1 << (vocabulary - 1) % 32 if vocabulary % 32 else -(2**31)
    bits[8] = -1
    bits[8, 0] = ~0b111
    right = likeliest(scores, bits)
    ours = decode_step.choose_allowed(scores.to(device), bits.to(device)).cpu()
    assert torch.equal(ours, right)
    following, lengths = (
        torch.zeros_like(ours).to(device),
        torch.zeros(len(ours), dtype=torch.int32).to(device),
    )
    tokens = torch.zeros_like(following)
    decode_step.choose(scores.to(device), tokens, following, lengths, bits.to(device))
    assert torch.equal(tokens.cpu(), ours), "as a graph chooses"
    assert torch.equal(following.cpu()[ours >= 0], ours[ours >= 0]), "what the next step reads"
    assert not lengths.any(), "rows that stay as long as they are"
    free = decode_step.choose_allowed(scores.to(device), None).cpu()
    assert torch.equal(free, likeliest(scores, torch.full_like(bits, -1)))
    assert torch.equal(free, likeliest(scores, None))
    assert right[2] == -1, "nothing is allowed"
    assert right[[3, 4, 5, 7]].tolist() == [-1] * 4
    assert right[8] == 3, "the first of equals that is allowed"
    assert right[6] == vocabulary - 1


ROPES = {
    "one axis": Rope(1e4, 32, None, False, None),
    "three axes": Rope(5e6, 24, (6, 3, 3), True, None),
    "three axes apart": Rope(1e6, 24, (2, 5, 5), False, None),
    "stretched": Rope(1e4, 32, None, False, YarnScaling(4.0, 4096, 32.0, 1.0, True, 1.2)),
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Also of positions that begin anywhere, or stand for all three axes."""
    rope = ROPES[name]
    flat = torch.randint(0, 200_000, (1 + 3 * 5,), generator=torch.Generator().manual_seed(1))
    apart = flat[1:].view(3, 5)
    for positions in (apart, apart[:1].expand(3, -1), apart[:, :0]):
        right = rotation_of(positions, rope, dtype)
        there = flat.to(device)[1:].view(3, 5)
        there = (
            there if positions is apart else there[:1].expand(3, -1) if positions.numel() else there[:, :0]
        )
        # The reference's: another device rounds a power otherwise, and far along that is an angle.
        steps = module._frequencies(rope, CPU).to(device)
        axes = None if rope.sections is None else module._axes(rope.sections, device, rope.interleaved)
        magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling | LongRope) else 1.0
        ours = rotation(there, steps, axes, magnitude, dtype)
        for mine, wanted in zip(ours, right, strict=True):
            assert mine.dtype == dtype
            tolerance = 1e-3 if dtype == torch.float16 else 4e-7
            torch.testing.assert_close(mine.cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("columns", [64, 1152])
def test_embedding(kind: str, columns: int, device: torch.device) -> None:
    table = Linear(columns, 9).to(torch.float16)
    table.store_as(kind, 64)  # type: ignore[arg-type]
    table.put(0, torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)))
    ids = torch.tensor([3, 8, 0, 3])
    right = table.lookup(ids, torch.float32)
    scale = None if table.scale is None else table.scale.to(device)
    ours = lookup(ids.to(device), table.weight.to(device), scale, table.group, torch.float32)
    assert torch.equal(ours.cpu(), right)
    assert lookup(ids[:0].to(device), table.weight.to(device), scale, 64, torch.float32).shape == (0, columns)
