"""Decode attention in one kernel: the reference's results, whatever was in its room, time after time."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snugvl.layers.attention import AttentionMetadata, paged_attention
from snugvl.layers.kernels import attention
from snugvl.layers.kernels.decode_cut import COUNTERS, DecodeCut, counters, cut_by_load
from snugvl.layers.kv_cache import E4M3, KVCache
from tests.layers.kernels.test_attention import BLOCK, cache, poison, tables, tolerance

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUT = DecodeCut(splits=4, step=16, stages=5)
Shape = tuple[int, int, int]  # heads, KV heads, dim


@pytest.fixture(autouse=True)
def poisoned_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One kernel; what it writes its partial outputs to is NaN before. Afterwards all counters are 0."""
    monkeypatch.setattr(attention, "ONE_KERNEL", True)
    plain = attention._partial
    monkeypatch.setattr(
        attention,
        "_partial",
        lambda *shape: tuple(room.fill_(torch.nan) for room in plain(*shape)),
    )
    yield
    assert not counters(DEVICE, 1).any()


def decode(
    shape: Shape,
    lengths: list[int],
    cut: DecodeCut,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv: torch.dtype | None = None,
    *,
    again: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One new token a sequence: the kernel's outputs, the second time with `again`, and the reference's."""
    heads, kv_heads, dim = shape
    store, table = cache(DEVICE, kv_heads, dim, dtype=kv or torch.float32), tables(lengths, DEVICE)
    if kv is None:
        store.storage = store.storage.to(dtype)
    poison(store, table, lengths)
    query = torch.randn(len(lengths), heads, dim, device=DEVICE).to(dtype)
    none = torch.zeros(1, dtype=torch.int64)
    metadata = AttentionMetadata((1,) * len(lengths), tuple(lengths), none, table, BLOCK)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "decode_cut", lambda *_: cut)
        where = (*store.layer(0), table.int(), counts, BLOCK, dim**-0.5, window)
        ours = attention.decode(query, *where)
        if again:
            first, ours = ours, attention.decode(query, *where)
            assert torch.equal(first, ours), "the counters start at 0 again"
    return ours, reference(query, store, metadata, dim**-0.5, window)


def reference(
    query: torch.Tensor, store: KVCache, metadata: AttentionMetadata, scale: float, window: int | None
) -> torch.Tensor:
    """Plain torch over the same bytes, on the CPU."""
    _, _, slots, kv_heads, dim = store.storage.shape
    plain = cache(torch.device("cpu"), kv_heads, dim, slots // BLOCK, E4M3 if store.fp8 else torch.float32)
    plain.storage = store.storage.cpu()
    placed = replace(metadata, block_tables=metadata.block_tables.cpu())
    return paged_attention(query.cpu(), plain, 0, placed, scale, window).to(query.device)


@pytest.mark.parametrize(
    ("shape", "kv"),
    [
        ((2, 2, 16), None), ((2, 1, 128), E4M3), ((3, 1, 32), None), ((4, 1, 16), E4M3),
        ((7, 1, 64), None), ((8, 1, 32), E4M3), ((17, 1, 16), None),
    ],
)  # fmt: skip
def test_every_sharing_of_kv_heads(shape: Shape, kv: torch.dtype | None) -> None:
    torch.testing.assert_close(*decode(shape, [1, 50], CUT, kv=kv, again=True), **tolerance(DEVICE))


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([(2, 1, 16), (4, 2, 32), (2, 2, 80)]),
    st.lists(st.integers(1, 90), min_size=1, max_size=2),
    st.none() | st.integers(1, 130),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([0, 32, 48]),
)
def test_any_length_window_and_cut(
    shape: Shape, lengths: list[int], window: int | None, splits: int, least: int
) -> None:
    cut = replace(CUT, splits=splits, least=least)
    torch.testing.assert_close(*decode(shape, lengths, cut, window), **tolerance(DEVICE))


interpreted = pytest.mark.skipif(
    DEVICE.type == "cpu", reason="Triton's interpreter multiplies bfloat16's bits"
)


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        pytest.param(torch.bfloat16, None, marks=interpreted),
        (torch.float16, None),
        (torch.bfloat16, E4M3),
    ],
)
def test_half_precision(dtype: torch.dtype, kv: torch.dtype | None) -> None:
    ours, expected = decode((4, 2, 32), [1, 70], CUT, dtype=dtype, kv=kv)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


def test_more_values_than_are_merged_at_a_time() -> None:
    cut = replace(CUT, splits=33)
    assert cut.together(3, 128) == 1
    torch.testing.assert_close(*decode((3, 1, 128), [40], cut), **tolerance(DEVICE))


def test_rows_without_tokens_are_zero_beside_others() -> None:
    store = cache(DEVICE, 2, 32)
    query = torch.randn(3, 4, 32, device=DEVICE)
    table = tables([0, 40, 0], DEVICE).int()
    counts = torch.tensor([0, 40, 0], dtype=torch.int32, device=DEVICE)
    poison(store, table.long(), [0, 40, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
        ours = attention.decode(query, *store.layer(0), table, counts, BLOCK, 1.0)
    assert not ours[[0, 2]].any()
    assert ours[1].isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # of the interpreter
def test_a_broken_row_is_seen_and_breaks_no_other() -> None:
    """NaN in a query gives NaN, so that its request is seen to fail."""
    store, table = cache(DEVICE, 1, 32), tables([70, 70], DEVICE).int()
    query = torch.randn(2, 2, 32, device=DEVICE)
    query[0] = torch.nan
    counts = torch.full((2,), 70, dtype=torch.int32, device=DEVICE)
    ours = attention.decode(query, *store.layer(0), table, counts, BLOCK, 1.0)
    assert ours[0].isnan().all()
    assert ours[1].isfinite().all()


def test_a_short_context_is_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """No merge, so nothing of the room is written."""
    rooms = []
    plain = attention._partial
    monkeypatch.setattr(attention, "_partial", lambda *shape: rooms.append(plain(*shape)) or rooms[-1])
    torch.testing.assert_close(*decode((2, 1, 32), [48], replace(CUT, least=48)), **tolerance(DEVICE))
    assert all(part.isnan().all() for room in rooms for part in room)
    decode((2, 1, 32), [49], replace(CUT, least=48))
    assert not rooms[-1][1].isnan().all()


@pytest.mark.parametrize(
    ("sequences", "splits"), [(1, 32), (2, 32), (4, 32), (8, 16), (16, 8), (32, 8), (64, 8), (512, 8)]
)
def test_few_sequences_are_cut_into_more_splits(sequences: int, splits: int) -> None:
    """An H200 has 132 multiprocessors; Qwen3-VL has 8 KV heads."""
    assert cut_by_load(sequences * 8, 132, 64) == DecodeCut(splits, step=32, stages=5, least=64)


def test_more_rows_than_there_were_counters_for() -> None:
    first = counters(DEVICE, 8)
    assert len(counters(DEVICE, COUNTERS + 1)) == 2 * COUNTERS
    assert counters(DEVICE, COUNTERS) is first, "a graph may hold its address"


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from snugvl.layers.kernels.merged_attention import attend_merged
kernel = attend_merged.kernel
types = dict(query="*bf16", keys="*bf16", values="*bf16", tables="*i32", lengths="*i32", partial="*fp32",
    logsums="*fp32", arrived="*i32", out="*bf16", scale="fp32", table_width="i32", slots="i32", least="i32")
constants = dict(KV_HEADS=2, SHARED=2, PAD=16, DIM=32, WIDE=32, BLOCK=16, STEP=16, SPLITS=4, TOGETHER=2,
    WINDOW=0, AHEAD=16, NATIVE=True, EARLY=True)
signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
source = ASTSource(kernel, signature, values)
options = {"num_warps": 4, "launch_pdl": True}
print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


def test_what_meets_at_a_counter_is_written_before_and_read_after() -> None:
    """In the compiled kernel: the interpreter runs one program after another, and would not notice."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kinds = (
        r"prefetch|griddepcontrol\.wait|bar\.sync|st\.global|ld\.global\.cg|ld\.global|cp\.async\.cg|atom.*"
    )
    steps = [found[0] for line in run.stdout.splitlines() if (found := re.search(kinds, line))]
    turn = steps.index("griddepcontrol.wait")
    assert "prefetch" in steps[:turn]
    assert set(steps[:turn]) <= {"prefetch", "ld.global.cg"}, "nothing that another kernel may be writing"
    (meeting,) = [index for index, step in enumerate(steps) if step.startswith("atom")]
    assert steps[meeting].startswith("atom.global.gpu.acq_rel")
    stored = max(index for index in range(meeting) if steps[index] == "st.global")
    assert set(steps[stored + 1 : meeting]) == {"bar.sync"}
    after = steps[meeting + 1 :]
    assert after[0] == "bar.sync"
    assert set(after) == {"bar.sync", "ld.global.cg", "st.global"}, "not from the multiprocessor's own cache"
    assert after[-1] == "st.global", "the counter, once all is read"
