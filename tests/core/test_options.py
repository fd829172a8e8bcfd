"""Options as the command line and as Python spell them."""

from typing import Any

import numpy as np
import pytest

import snugvl
from snugvl.core.options import LoadOptions, in_python, typed
from snugvl.core.sampling import SamplingParams
from snugvl.errors import RequestError


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("it fits with --memory 366MiB", 'it fits with memory="366MiB"'),
        ("it fits with --context 4096.", "it fits with context=4096."),
        ("a larger GPU, and no --memory", "a larger GPU, and no memory=…"),
        ("--no-prefix-cache keeps it out", "prefix_cache=False keeps it out"),
        ("--language-only would free it", "language_only=True would free it"),
        ("say --for chat, or --kv-cache bf16;", 'say purpose="chat", or kv_cache="bf16";'),
        ("--memory 5.5GiB, --held SIZE", 'memory="5.5GiB", --held SIZE'),
        ("look: snugvl plan X --memory 5GiB --context 1", "look: snugvl plan X --memory 5GiB --context 1"),
    ],
)
def test_a_message_has_options_as_python_takes_them(said: str, meant: str) -> None:
    assert in_python(said) == meant


def test_an_error_of_load_has_no_options_of_the_shell() -> None:
    with pytest.raises(snugvl.DoesNotFit, match=r'it fits with memory="\d+MiB"$'):
        snugvl.load("pocket", memory="10MB")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kv_cache", "fp8", ["--kv-cache", "fp8"]),
        ("purpose", "chat", ["--for", "chat"]),
        ("context", 4096, ["--context", "4096"]),
        ("language_only", True, ["--language-only"]),
        ("prefix_cache", False, ["--no-prefix-cache"]),
    ],
)
def test_an_option_is_typed_with_its_value_and_a_switch_without(
    name: str, value: object, words: list[str]
) -> None:
    """`--no-prefix-cache False` would be an argument too many."""
    assert typed(name, value) == words


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("fp32", "float32"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("torch.float16", "float16"),
        ("auto", "auto"),
    ],
)
def test_a_type_may_be_written_as_reports_and_other_programs_write_it(said: Any, meant: str) -> None:
    options = LoadOptions(dtype=said)
    assert (options.dtype, options) == (meant, LoadOptions(dtype=meant))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="dtype 'int3' is unknown; use auto, float32, bfloat16, float16"):
        LoadOptions(dtype="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "held"), [(8e9, 8_000_000_000), (np.int64(5), 5), ("1MiB", 1 << 20), (None, None)]
)
def test_memory_is_a_size_or_a_whole_number_of_bytes(memory: Any, held: int | None) -> None:
    assert LoadOptions(memory=memory).memory_bytes == held


@pytest.mark.parametrize("memory", [1.5, float("nan"), True, b"1MiB", [1]])
def test_other_memory_is_refused_by_name(memory: Any) -> None:
    with pytest.raises(RequestError, match="memory is a size such as '7200MiB', or a whole number of bytes"):
        LoadOptions(memory=memory)


def test_whole_numbers_of_numpy_are_taken() -> None:
    options = LoadOptions(context=np.int64(4096), concurrency=np.int32(2), max_pixels=np.uint8(9))  # type: ignore[arg-type]
    assert options == LoadOptions(context=4096, concurrency=2, max_pixels=9)
    assert type(options.context) is int


def test_numbers_of_numpy_choose_as_python_s_do() -> None:
    said = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), seed=np.uint64(7))  # type: ignore[arg-type]
    assert said == SamplingParams(max_tokens=5, temperature=0.5, seed=7)
    assert (type(said.max_tokens), type(said.temperature)) == (int, float)
    with pytest.raises(RequestError, match="max_tokens must be a whole number from 1 on, not True"):
        SamplingParams(max_tokens=True)
    with pytest.raises(RequestError, match="a whole number from 1 to 2147483648, not 9999999999"):
        SamplingParams(max_tokens=9999999999)
