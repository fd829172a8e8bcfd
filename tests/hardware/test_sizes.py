"""Sizes as people write them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snugvl.core.sizes import GIB, MAX_BYTES, MIB, format_size, parse_size
from snugvl.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("951MiB", 951 * MIB),
        ("7.2GiB", int(7.2 * GIB)),
        ("8GB", 8 * 10**9),
        ("8g", 8 * GIB),
        ("8G", 8 * GIB),
        (" 8 gib ", 8 * GIB),
        (".5GiB", GIB // 2),
        ("0", 0),
        ("0MiB", 0),
        ("512b", 512),
        ("1.5k", 1536),
        ("1t", 1024 * GIB),
    ],
)
def test_spellings(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "banana", "951", "-1GiB", "−1GiB", "1,5GiB", "8151,0MiB", "1e9b", "nan", "inf", "8XB", "8GiBB",
     "MiB", "1.2.3GiB", "9999999TiB", "٣GiB", "8 G B", "0x10MiB", "1_000MiB"],
)  # fmt: skip
def test_nonsense_names_the_value(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_size(text, "--held")
    assert "--held" in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_input_error(text: str) -> None:
    with suppress(InputError):
        assert 0 <= parse_size(text) <= MAX_BYTES


@given(st.integers(0, MAX_BYTES), st.sampled_from(["b", "B"]))
def test_whole_bytes_survive(size: int, unit: str) -> None:
    assert parse_size(f"{size}{unit}") == size


@given(st.integers(0, 10**5), st.sampled_from(["MiB", "GiB", "MB", "GB", "m", "g"]))
def test_more_is_never_less(number: int, unit: str) -> None:
    assert parse_size(f"{number}{unit}") < parse_size(f"{number}.5{unit}") < parse_size(f"{number + 1}{unit}")


@given(st.integers(0, 2**45))
def test_what_is_printed_reads_back_nearly(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= max(size * 0.05, MIB)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 MiB"), (951 * MIB, "951 MiB"), (1023 * MIB + 700 * 1024, "1.00 GiB"), (7549747200, "7.03 GiB"),
     (143771 * MIB, "140.4 GiB"), (2 * 1024 * GIB, "2.0 TiB"), (2048, "2 KiB"), (-MIB, "-1 MiB")],
)  # fmt: skip
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text
