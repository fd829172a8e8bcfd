"""The kernels of Gated DeltaNet against plain torch: whole batches, their states, and nobody else's."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from snugvl.checkpoint.architecture import LinearAttention
from snugvl.layers.attention import AttentionMetadata
from snugvl.layers.delta_rule import CHUNK
from snugvl.layers.kernels.device import Hardware, described
from snugvl.layers.kv_cache import StateCache
from snugvl.models.linear_attention import GatedDeltaNet
from tests.engine.toy import HybridToy

SLOTS = 8
SIZES = (
    LinearAttention(key_heads=2, value_heads=2, key_dim=16, value_dim=32, kernel=4),
    LinearAttention(key_heads=1, value_heads=4, key_dim=24, value_dim=40, kernel=4),
)
TILED = LinearAttention(key_heads=2, value_heads=4, key_dim=16, value_dim=16, kernel=4, tiled=True)
BATCHES = {  # new tokens of each sequence, and those that it had before
    "decodes": ([1, 1, 1], [9, 1, 70]),
    "prompt": ([7], [0]),
    "chunks": ([64, 65], [0, 3]),
    "a long one beside decodes": ([1, 150, 1, 2], [4, 64, 30, 0]),
    "prompts of one token": ([1, 1, 40], [0, 3, 0]),
    "guesses": ([2, 1, 8, 63], [9, 4, 1, 5]),
    "guesses at once": ([15, 8, 2], [0, 70, 3]),
}
UNSURE = {2: 1, 8: 7, 15: 7, 63: 60}  # of the new tokens of a sequence with so many


def layer(sizes: LinearAttention, device: torch.device, dtype: torch.dtype = torch.float32) -> GatedDeltaNet:
    torch.manual_seed(0)
    text = replace(HybridToy.plan.text, linear=sizes)
    made = GatedDeltaNet(text, 0).requires_grad_(False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    made.dt_bias.sub_(5)  # some heads remember what came a hundred tokens before
    return made.to(device, dtype)


def states(sizes: LinearAttention, device: torch.device, dtype: torch.dtype = torch.float32) -> StateCache:
    generator = torch.Generator().manual_seed(1)
    heads = (sizes.value_heads, sizes.key_dim, sizes.value_dim)
    inputs = (sizes.kernel - 1, sizes.channels)
    made = StateCache(num_layers=1, slots=SLOTS, heads=heads, inputs=inputs, dtype=dtype, device=device)
    for values in (made.recurrent, made.inputs):
        values.copy_(torch.randn(values.shape, generator=generator))
    return made


def batch(new: Sequence[int], before: Sequence[int], device: torch.device) -> AttentionMetadata:
    tokens = torch.zeros(sum(new), dtype=torch.int64, device=device)
    context = tuple(map(sum, zip(new, before, strict=True)))
    slots = torch.tensor([5, 0, 3, 6][: len(new)], device=device)
    landing = [(n - 1) // CHUNK * CHUNK if n == max(new) else 0 for n in new]
    landings = torch.tensor(landing, device=device)
    unsure = torch.tensor([UNSURE.get(n, 0) for n in new], device=device)
    made = AttentionMetadata(
        tuple(new), context, tokens, tokens[None], 16, state_slots=slots, landings=landings, unsure=unsure
    )
    return made.on_device()


@pytest.mark.parametrize(
    ("name", "sizes"), [*((name, SIZES[1]) for name in BATCHES), ("chunks", SIZES[0]), ("guesses", SIZES[0])]
)
@pytest.mark.sample("decodes-sizes0", "chunks-sizes2", "guesses-sizes5")
def test_a_batch_equals_plain_torch(name: str, sizes: LinearAttention, device: torch.device) -> None:
    ours, metadata = layer(sizes, device), batch(*BATCHES[name], device)
    tokens = len(metadata.slot_mapping)
    projected = torch.randn(tokens, sizes.channels + sizes.values, device=device)
    rates = torch.randn(tokens, 2 * sizes.value_heads, device=device)
    right, found = states(sizes, device), states(sizes, device)
    untouched = found.recurrent.clone()
    for values in (right, found):  # of sequences that begin: nobody reads them
        for row, before in enumerate(BATCHES[name][1]):
            if before == 0:
                values.recurrent[:, metadata.state_slots[row]] = torch.nan
                values.inputs[:, metadata.state_slots[row]] = torch.nan
    wanted = ours._plain(projected, rates, right, metadata)
    outputs = ours._by_kernels(projected, rates, found, metadata)
    torch.testing.assert_close(outputs, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.recurrent, right.recurrent, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.inputs, right.inputs, atol=0, rtol=0)
    mine = [*metadata.state_slots.tolist(), *[SLOTS] * bool(metadata.landings.any())]
    strangers = [slot for slot in range(SLOTS + 1) if slot not in mine]
    assert torch.equal(found.recurrent[:, strangers], untouched[:, strangers]), (
        "a stranger's state was touched"
    )


@pytest.mark.parametrize("name", ["a long one beside decodes", "guesses"])
@pytest.mark.sample("guesses")
def test_loops_equal_plain_torch(name: str, device: torch.device) -> None:
    """Before Ampere, where squares of a chunk aren't multiplied as such."""
    with described(Hardware((7, 5), 46)):
        test_a_batch_equals_plain_torch(name, SIZES[1], device)


@pytest.mark.parametrize("name", ["decodes", "chunks"])
def test_tiled_value_heads_are_grouped_ones_in_another_order(name: str, device: torch.device) -> None:
    """A GGUF's order: values, gates, rates and states of heads move, and nothing else."""
    grouped, metadata = replace(TILED, tiled=False), batch(*BATCHES[name], device)
    order = torch.tensor([0, 2, 1, 3])  # of value heads: those of one key head are neighbours, then not
    ours, theirs = layer(TILED, device), layer(grouped, device)
    keys = 2 * 2 * 16
    values = (keys + order[:, None] * 16 + torch.arange(16)).flatten()
    channels = torch.cat((torch.arange(keys), values)).to(device)
    ours.conv1d.weight.copy_(theirs.conv1d.weight[channels])
    for parameter in ("A_log", "dt_bias"):
        getattr(ours, parameter).copy_(getattr(theirs, parameter)[order])
    tokens = len(metadata.slot_mapping)
    projected = torch.randn(tokens, grouped.channels + grouped.values, device=device)
    rates = torch.randn(tokens, 8, device=device)
    moved = torch.cat((projected[:, channels], projected[:, 64:][:, values]), 1)
    moved_rates = rates.view(tokens, 2, 4)[..., order].flatten(1)
    right, found, plain = states(grouped, device), states(TILED, device), states(TILED, device)
    for each in (found, plain):
        each.recurrent.copy_(right.recurrent[:, :, order])
        each.inputs.copy_(right.inputs[..., channels])
    wanted = theirs._plain(projected, rates, right, metadata).view(tokens, 4, 16)[:, order].flatten(1)
    by_kernels = ours._by_kernels(moved, moved_rates, found, metadata)
    by_torch = ours._plain(moved, moved_rates, plain, metadata)
    for outputs in (by_kernels, by_torch):
        torch.testing.assert_close(outputs, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("sizes", SIZES[:1])
@pytest.mark.parametrize("kernels", [False, True])
def test_guessed_tokens_are_answered_and_leave_nothing(
    kernels: bool, sizes: LinearAttention, device: torch.device
) -> None:
    """What they find is what they find as tokens like any other; the state is that before them."""
    ours, metadata = layer(sizes, device), batch(*BATCHES["guesses"], device)
    attend = ours._by_kernels if kernels else ours._plain
    tokens = len(metadata.slot_mapping)
    projected = torch.randn(tokens, sizes.channels + sizes.values, device=device)
    rates = torch.randn(tokens, 2 * sizes.value_heads, device=device)
    found, all_sure, shorter = (states(sizes, device) for _ in range(3))
    outputs = attend(projected, rates, found, metadata)
    wanted = attend(projected, rates, all_sure, replace(metadata, unsure=torch.zeros_like(metadata.unsure)))
    torch.testing.assert_close(outputs, wanted, atol=2e-5, rtol=1e-4)
    new, before = BATCHES["guesses"]
    rows = [first + n for first, count in zip(accumulate([0, *new]), new, strict=False)
            for n in range(count - UNSURE.get(count, 0))]  # fmt: skip
    sure = batch([n - UNSURE.get(n, 0) for n in new], before, device)
    sure = replace(sure, landings=torch.zeros_like(sure.landings), unsure=torch.zeros_like(metadata.unsure))
    attend(projected[rows], rates[rows], shorter, sure)
    torch.testing.assert_close(found.recurrent, shorter.recurrent, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.inputs, shorter.inputs, atol=0, rtol=0)
    assert not torch.allclose(found.recurrent, all_sure.recurrent, atol=1e-2)
    assert not torch.allclose(found.inputs, all_sure.inputs, atol=1e-2)


@pytest.mark.parametrize("lengths", [[3, 0, 0], [65, 1, 0]])
def test_rows_of_nobody_change_nothing(lengths: list[int], device: torch.device) -> None:
    """A CUDA graph's last sequences have no tokens, and its last tokens belong to none."""
    sizes = SIZES[0]
    ours, real = layer(sizes, device), [n for n in lengths if n]
    tokens = sum(lengths) + 9
    projected = torch.randn(tokens, sizes.channels + sizes.values, device=device)
    rates = torch.randn(tokens, 2 * sizes.value_heads, device=device)
    metadata = batch(real, [5] * len(real), device)
    right, found = states(sizes, device), states(sizes, device)
    wanted = ours._plain(projected[: sum(real)], rates[: sum(real)], right, metadata)
    padded = replace(
        metadata,
        query_lens=(tokens,) + (1,) * (len(lengths) - 1),
        starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        lengths=torch.tensor([n + 5 if n else 0 for n in lengths], dtype=torch.int32, device=device),
        state_slots=torch.tensor([5, 0, 0][: len(lengths)], device=device),
        landings=torch.tensor([*metadata.landings.tolist(), 0, 0][: len(lengths)], device=device),
        unsure=torch.zeros(len(lengths), dtype=torch.int64, device=device),
    )
    outputs = ours._by_kernels(projected, rates, found, padded)
    torch.testing.assert_close(outputs[: sum(real)], wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.recurrent, right.recurrent, atol=2e-5, rtol=1e-4)
    alone = replace(
        padded, query_lens=(1,) * 3, starts=None, lengths=torch.zeros(3, dtype=torch.int32, device=device)
    )
    before = found.recurrent.clone()
    ours._by_kernels(projected[:3], rates[:3], found, alone)
    assert torch.equal(found.recurrent, before), "a decode step's padding changed a state"


@pytest.mark.parametrize("sizes", [SIZES[0], LinearAttention(1, 2, 128, 128, 4)])
@pytest.mark.sample("sizes1")
def test_sixteen_bits_come_in_and_states_stay_wide(sizes: LinearAttention, device: torch.device) -> None:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16  # which the interpreter can multiply
    ours, metadata = layer(sizes, device, kind), batch([150, 1], [0, 8], device)
    projected = torch.randn(151, sizes.channels + sizes.values, device=device).to(kind)
    rates = torch.randn(151, 2 * sizes.value_heads, device=device).to(kind)
    right, found = states(sizes, device, kind), states(sizes, device, kind)
    wanted = ours._plain(projected, rates, right, metadata)
    outputs = ours._by_kernels(projected, rates, found, metadata)
    assert found.recurrent.dtype == torch.float32
    assert (outputs - wanted).float().norm() < 1e-2 * wanted.float().norm()
    assert (found.recurrent - right.recurrent).norm() < 1e-2 * right.recurrent.norm()
