"""Any JSON at any key of a configuration gives a plan or one of our errors, whoever wrote it."""

import contextlib
import copy
import json
import math
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from snugvl.checkpoint.assemble import assemble, network_of
from snugvl.checkpoint.catalogue import entries
from snugvl.checkpoint.facts import Material, Stored
from snugvl.checkpoint.families import parse_config
from snugvl.checkpoint.safetensors import parse_header
from snugvl.errors import CheckpointError, SnugvlError
from snugvl.hardware.describe import describe
from snugvl.planner.report.plain import plain
from snugvl.planner.report.sections import report
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes
from tests.draws import draws

Document = dict[str, Any]

_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    2**31,
    2**40,
    2**63,
    10**400,
    0.5,
    1e-320,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
)
_SCALARS = st.one_of(
    st.sampled_from(_NUMBERS),
    st.sampled_from(
        (
            None,
            True,
            False,
            "",
            "silu",
            "default",
            "yarn",
            "longrope",
            "linear",
            "llama3",
            "\ud800",
            "a\n\x1b",
            "x" * 10_000,
        )
    ),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(("rope_type", "factor", "rope_theta", "weights", "bits")), inner, max_size=3
        )
    ),
    max_leaves=6,
)
_QUANTIZED: tuple[Document, ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
        },
    },
)
_ADDED = (
    "layer_types", "rope_parameters", "rope_scaling", "sliding_window", "use_sliding_window", "head_dim",
    "max_window_layers", "tie_word_embeddings", "quantization_config", "original_max_position_embeddings",
    "attention_bias", "mtp_num_hidden_layers", "partial_rotary_factor", "min_pixels", "max_pixels",
    "mlp_only_layers", "decoder_sparse_step", "full_attention_interval", "text_config", "vision_config",
    "max_patches", "dtype",
)  # fmt: skip


@cache
def bases() -> tuple[tuple[Document, Document | None], ...]:
    """One configuration of every architecture of the catalogue, with few layers, so that one is quick."""
    found: dict[str, tuple[Document, Document | None]] = {}
    for entry in reversed(entries()):
        config = copy.deepcopy(dict(entry.config))
        for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
            for key in ("num_hidden_layers", "depth"):
                if key in part:
                    part[key] = 4
            part.pop("layer_types", None)
        images = copy.deepcopy(dict(entry.images)) if entry.images is not None else None
        found[config["architectures"][0]] = (config, images)
    return tuple(found.values())


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a document with each of its keys."""
    if isinstance(document, dict | list):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from places(document[key])


def plan(config: Document, images: Document | None) -> None:
    """All of what `snugvl plan` makes of a configuration whose tensors are as it says."""
    network = network_of(config, images, "org/small")
    tensors = tuple(
        Stored(each.name, "BF16", each.shape, 2 * math.prod(each.shape)) for each in network.tensors
    )
    facts = assemble("org/small", Material("org/small", "hub", None, config, images, tensors, 1))
    for machine in (describe("rtx-4090"), describe("rtx-5060", ram="4GiB")):
        found = solve([Candidate(facts)], machine, Wishes(images=1 if facts.vision else 0))
        assert plain(report(found, machine, None))


def test_the_configurations_are_right_before_they_are_changed() -> None:
    for config, images in bases():
        plan(config, images)


@draws(150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_at_any_key_is_a_plan_or_an_error_of_ours(data: st.DataObject) -> None:
    config, images = copy.deepcopy(data.draw(st.sampled_from(bases())))
    if data.draw(st.integers(0, 3)) == 0:
        config["quantization_config"] = copy.deepcopy(data.draw(st.sampled_from(_QUANTIZED)))
    for _ in range(data.draw(st.integers(1, 2))):
        spots = [*places(config), *places(images or {})]
        container, key = data.draw(st.sampled_from(range(len(spots))).map(spots.__getitem__))
        if isinstance(container, dict) and data.draw(st.integers(0, 2)) == 0:
            key = data.draw(st.sampled_from(_ADDED))
        container[key] = data.draw(_VALUES)
    with contextlib.suppress(SnugvlError):
        plan(config, images)
    with contextlib.suppress(SnugvlError):
        parse_config(config, "org/small")


ENTRY: Document = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@draws(200)
@given(
    changes=st.dictionaries(st.sampled_from(("dtype", "shape", "data_offsets")), _VALUES, max_size=3),
    beside=_VALUES,
)
def test_any_value_in_a_header_is_read_or_an_error_of_ours(changes: Document, beside: Any) -> None:
    raw = json.dumps({"w": ENTRY | changes, "v": beside}).encode()
    with contextlib.suppress(SnugvlError):
        parse_header(raw, Path("x.safetensors"), 10**6)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": ENTRY | {"dtype": ["F32"]}}, "is of dtype"),
        ({"w": ENTRY | {"dtype": {"F32": 1}}}, "is of dtype"),
        ({"w": ENTRY | {"shape": [2**62] * 1000}}, "expected whole numbers"),
        ({"w": ENTRY | {"shape": [10**4000] * 9}}, "expected whole numbers"),
        ({"w": ENTRY | {"shape": [1] * 100_000}}, "expected whole numbers"),
        ({"w": ENTRY | {"data_offsets": [8, 0]}}, "needs 8 bytes, its header gives it -8"),
        ({"w": ENTRY, "v": ENTRY}, "tensors 'v' and 'w' share bytes"),
        ({"w": ENTRY, "v": ENTRY | {"data_offsets": [4, 12]}}, "share bytes"),
        ('{"w": 1, "w": 2}', "'w' is in it twice"),
        ('{"w": {"dtype": "F32", "dtype": "F32"}}', "'dtype' is in it twice"),
        ('{"w": ' + "1" * 5000 + "}", "corrupt header"),
        ('{"w": ' + "[" * 100_000, "corrupt header"),
        ('{"\\ud800' + "x" * 100_000 + '": 1}', "has a corrupt header entry"),
    ],
)
def test_a_header_that_lies_is_named_in_a_line(header: Document | str, message: str) -> None:
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_header(raw, Path("x.safetensors"), 10**6)
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


def test_more_tensors_than_a_checkpoint_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snugvl.checkpoint.safetensors.MAX_TENSORS", 10)
    raw = json.dumps({str(n): ENTRY | {"shape": [0], "data_offsets": [0, 0]} for n in range(11)}).encode()
    with pytest.raises(CheckpointError, match="brings the tensors to 11; 10 are read at most"):
        parse_header(raw, Path("x.safetensors"), 10**6)


@pytest.mark.parametrize(
    "text", ["1" * 5000, '{"a": ' + "9" * 5000 + "}", "[" * 100_000, "\ufeff{}", "\x00", "{} {}"]
)
def test_a_json_file_that_is_none_is_an_error_of_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    from snugvl.checkpoint.read import facts_of

    with pytest.raises(CheckpointError):
        facts_of(str(tmp_path))
