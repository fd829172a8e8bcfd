"""KL and likeliest tokens slice by slice, against the whole table of probabilities at once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import torch

from snugvl.fidelity import distributions
from snugvl.fidelity.distributions import Side, judge, masks_of
from snugvl.layers.weights import FormatName, to_int8
from snugvl.models.layered import LayeredNetwork
from snugvl.models.loader import Storage, open_checkpoint
from tests.fidelity.conftest import POCKET, divergence

CPU = torch.device("cpu")


Open = Callable[..., LayeredNetwork]


@pytest.fixture
def network() -> Iterator[Open]:
    """Opens pocket, with its head in some format."""
    with ExitStack() as stack:

        def opened(head: FormatName = "bf16") -> LayeredNetwork:
            checkpoint = open_checkpoint(POCKET, dtype=torch.float32, storage=Storage(head=head))
            return stack.enter_context(closing(LayeredNetwork(checkpoint, CPU)))

        yield opened


def states(count: int, hidden: int, seed: int) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(("rows", "slice_bytes"), [(256, 64 << 20), (3, 4 * 256 * 100)])
def test_slices_give_what_the_whole_vocabulary_gives(
    rows: int, slice_bytes: int, network: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, "ROWS", rows)
    monkeypatch.setattr(distributions, "SLICE_BYTES", slice_bytes)
    wide, narrow = network(), network("int8")
    hidden, vocab = wide.model.config.text.hidden_size, wide.vocab_size
    right, ours = states(8, hidden, 0), states(8, hidden, 1)
    ours[::2] = right[::2] + 0.01 * ours[::2]
    table = wide.head_rows(0, vocab)
    logits = right @ table.T, ours @ to_int8(table).wide(torch.float32).T
    judged = judge(Side(wide, right), Side(narrow, ours))
    assert judged.kl is not None
    assert judged.same is not None
    torch.testing.assert_close(
        judged.kl, divergence(*(each.double() for each in logits)), rtol=1e-3, atol=1e-6
    )
    assert judged.same.tolist() == (logits[0].argmax(-1) == logits[1].argmax(-1)).tolist()
    assert 0 < judged.same.sum() < 8
    assert judged.best.tolist() == logits[0].argmax(-1).tolist()
    alone = judge(Side(wide, right))
    assert alone.kl is None
    assert alone.best.tolist() == judged.best.tolist()


def test_a_side_beside_itself_is_no_different(network: Open) -> None:
    one = network()
    right = states(5, one.model.config.text.hidden_size, 2)
    judged = judge(Side(one, right), Side(network(), right))
    assert judged.kl is not None
    assert judged.kl.max() < 1e-12
    assert judged.same is not None
    assert bool(judged.same.all())


def test_the_best_token_is_one_that_the_mask_allows(network: Open) -> None:
    one = network()
    vocab = one.vocab_size
    right = states(4, one.model.config.text.hidden_size, 3)
    masks = torch.zeros(4, -(-vocab // 32), dtype=torch.int32)
    allowed = [[31], [vocab - 1, 7], [32, 63, 64], list(range(vocab))]
    for row, tokens in zip(masks, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)
    logits = right @ one.head_rows(0, vocab).T
    wanted = [
        max(tokens, key=lambda token, row=row: logits[row, token].item())
        for row, tokens in enumerate(allowed)
    ]
    assert judge(Side(one, right), None, masks).best.tolist() == wanted


class Digits:
    """A grammar of one token after the other, 1, 2, 3, …"""

    def start(self) -> "Digits":
        self.at = 1
        return self

    def fill(self, bits: torch.Tensor) -> None:
        bits.zero_()
        bits[0] = 1 << self.at

    def accept(self, token: int) -> None:
        self.at = token + 1


def test_masks_follow_the_answer() -> None:
    masks = masks_of(Digits(), (1, 2, 5), 64)  # type: ignore[arg-type]
    assert masks[:, 0].tolist() == [1 << 1, 1 << 2, 1 << 3]
    assert masks.shape == (3, 2)
