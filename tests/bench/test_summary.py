"""The arithmetic, on schedules made up by hand."""

import pytest

from snugvl.bench.load import LEAST_TOKENS, Record, percentile
from snugvl.bench.result import rate, spread, summarize


def record(sent: float, *pieces: float, tokens: int | None = None, error: str | None = None) -> Record:
    """Ends with its last piece."""
    count = len(pieces) if tokens is None else tokens
    end = pieces[-1] if pieces else sent
    return Record(sent, end, pieces, None, 10, count, "usage", "length", error)


def test_one_request() -> None:
    one = record(1.0, 1.5, 1.6, 1.8)
    assert one.first_token_s == pytest.approx(0.5)
    assert one.latency_s == pytest.approx(0.8)
    assert one.gaps_s == pytest.approx((0.1, 0.2))
    assert record(1.0, 1.5, *[1.5 + n / 10 for n in range(1, 8)]).decode_tokens_per_s == pytest.approx(10)


def test_tokens_that_come_several_in_a_piece() -> None:
    one = record(0.0, 1.0, 2.0, tokens=9)
    assert one.decode_tokens_per_s == pytest.approx(8.0)
    assert one.gaps_s == (1.0,)


def test_tokens_without_text_at_the_end_take_their_time() -> None:
    one = Record(0.0, 5.0, (1.0, 2.0), 4.0, output_tokens=10)
    assert one.decode_tokens_per_s == pytest.approx(3.0)


@pytest.mark.parametrize("pieces", [(), (1.0,), (1.0, 1.0)])
def test_no_decode_rate_without_time_between_pieces(pieces: tuple[float, ...]) -> None:
    assert record(0.0, *pieces, tokens=9).decode_tokens_per_s is None


@pytest.mark.parametrize("tokens", range(1, LEAST_TOKENS))
def test_no_decode_rate_of_an_answer_that_one_read_of_the_socket_may_hold(tokens: int) -> None:
    """Two tokens that came 25 µs apart once made 40,555 tokens/s."""
    assert record(0.0, 1.0, 1.000025, tokens=tokens).decode_tokens_per_s is None


def test_percentiles_are_interpolated() -> None:
    values = [float(value) for value in range(101)]
    assert [percentile(values, share) for share in (0, 0.5, 0.95, 0.99, 1)] == [0, 50, 95, 99, 100]
    assert percentile([1.0, 2.0], 0.25) == 1.25
    assert percentile([7.0], 0.99) == 7.0


def test_a_spread() -> None:
    found = spread([4.0, None, 1.0, 2.0, 3.0])
    assert found is not None
    assert (found.count, found.min, found.median, found.mean, found.max) == (4, 1.0, 2.5, 2.5, 4.0)
    assert found.p95 == pytest.approx(3.85)
    assert spread([None]) is None


def test_rates_are_from_the_first_sent_to_the_last_ended() -> None:
    records = [record(1.0, 2.0, 3.0), record(2.0, 4.0, 5.0), record(2.0, 9.0, error="timeout")]
    assert rate(records, tokens=True) == pytest.approx(4 / 8)
    assert rate(records, tokens=False) == pytest.approx(2 / 8)
    assert rate(records[2:], tokens=True) is None


def test_a_level() -> None:
    repeats = [
        [record(0.0, 0.1, 0.2, 0.3), record(0.0, 0.3, 0.5, 1.0)],
        [record(0.0, 0.2, 0.3, 0.5), record(0.0, 0.4, error="429 queue_full")],
    ]
    level = summarize(2, repeats)
    assert (level.clients, level.repeats, level.requests, level.failed) == (2, 2, 4, 1)
    assert level.errors == {"429 queue_full": 1}
    assert level.first_token_s is not None
    assert level.first_token_s.median == pytest.approx(0.2)
    assert level.inter_token_s is not None
    assert level.inter_token_s.count == 6
    assert level.latency_s is not None
    assert level.latency_s.max == pytest.approx(1.0)
    assert level.output_tokens_per_s is not None
    assert (level.output_tokens_per_s.min, level.output_tokens_per_s.max) == pytest.approx((6.0, 6.0))
    assert level.requests_per_s is not None
    assert level.requests_per_s.median == pytest.approx(2.0)
    assert level.output_tokens is not None
    assert level.output_tokens.count == 3


def test_a_level_without_a_good_answer() -> None:
    level = summarize(1, [[record(0.0, error="500")]])
    assert level.failed == 1
    assert level.first_token_s is None
    assert level.output_tokens_per_s is None
