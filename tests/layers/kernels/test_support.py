"""The search for top_k's and top_p's threshold against sorting the whole row."""

import pytest
import torch

from snugvl.core.sampling import SamplingParams
from snugvl.engine.sampling.filters import _Columns, _support_of_all
from snugvl.layers.kernels import support

CASES = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400},
    {"top_p": 0.05},
    {"top_p": 0.83},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"top_k": 300, "top_p": 0.61, "min_p": 0.01},
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "STEP", 256)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "excluded"])
def test_what_is_left_is_what_sorting_leaves(kind: str, device: torch.device) -> None:
    """Rows of two blocks. Every other filter on each kind of scores: the interpreter takes its time."""
    cases = CASES[::2] if kind in ("flat", "excluded") else CASES[1::2]
    scores = torch.randn(len(cases), 500, generator=torch.Generator().manual_seed(3))
    if kind == "peaked":
        scores *= 9
    elif kind == "ties":
        scores = (scores * 2).round()
    elif kind == "excluded":
        scores[:, ::3] = -torch.inf
    params = [SamplingParams(temperature=1.0, **case) for case in cases]
    columns = _Columns.of(params, torch.device("cpu"))
    expected = _support_of_all(scores, columns) & (scores > -torch.inf)
    kept = torch.zeros_like(scores, dtype=torch.bool, device=device)
    sure = torch.zeros(len(cases), dtype=torch.bool, device=device)
    given = (columns.top_k, columns.top_p.float(), columns.min_p)
    support.search(scores.to(device), kept, sure, *(part.to(device) for part in given))
    assert torch.equal(kept.cpu() & (scores > -torch.inf), expected)


def test_a_row_that_is_sure_stays(device: torch.device) -> None:
    scores = torch.randn(2, 300).to(device)
    columns = _Columns.of([SamplingParams(temperature=1.0, top_k=3)] * 2, device)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[0, 5] = True
    sure = torch.tensor([True, False], device=device)
    support.search(scores, kept, sure, columns.top_k, columns.top_p.float(), columns.min_p)
    assert kept.sum(-1).tolist() == [1, 3]
    assert bool(kept[0, 5])
