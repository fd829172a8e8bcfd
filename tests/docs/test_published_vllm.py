"""What vLLM published, planned: every goal is met, and the page shows what the script prints."""

from pathlib import Path

import pytest

from tests.docs import published_vllm as published

ROOT = Path(__file__).parents[2]


def test_every_goal_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert published.main([]) == 0, capsys.readouterr().out
    found = published.rows()
    assert sum(row.loaded is not None for row in found) >= 30
    assert sum(row.tokens is not None for row in found) >= 15


def test_a_figure_that_is_off_is_missed() -> None:
    seen = dict(published.observations()[0])
    assert published.row_of(seen).met
    assert not published.row_of(seen | {"loaded_gib": seen["loaded_gib"] * 1.008}).met
    assert not published.row_of(seen | {"kv_tokens": round(seen["kv_tokens"] * 1.005)}).met


def test_the_rest_of_a_start_is_near_what_was_logged() -> None:
    """Within half a GiB: CUDA graphs, what a tower profiles and libraries are predictions."""
    found = [row for row in published.rows() if row.overhead is not None]
    assert len(found) >= 4
    for row in found:
        assert abs(row.planned_overhead - row.overhead) < 0.5, row.model


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert "\n".join(published.table(published.rows())) in page, "python -m tests.docs.published_vllm --table"
