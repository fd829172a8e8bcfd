"""A whole tiny checkpoint: random weights, a real tokenizer and template, and transformers beside it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from snugvl.backends.native.backend import NativeBackend
from snugvl.checkpoint.families import read_config
from snugvl.core.config import EngineConfig
from snugvl.core.messages import Capabilities
from snugvl.engine.engine import Engine
from snugvl.inputs.prompt import Processor
from snugvl.models.loader import load_model
from snugvl.models.networks import Qwen3VL
from tests import checkpoints
from tests.inputs.conftest import SPECIAL, small_tokenizer, write_checkpoint

CPU = torch.device("cpu")
CONFIG = EngineConfig(num_blocks=256, max_model_len=2048, max_batched_tokens=256)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("whole"))
    tokenizer = small_tokenizer()
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    options = checkpoints.Options(
        vocab=512,
        placeholders=(
            ids["<|image_pad|>"], ids["<|video_pad|>"], ids["<|vision_start|>"], ids["<|vision_end|>"],
        ),
    )  # fmt: skip
    return checkpoints.write(folder, options)


@pytest.fixture(scope="session")
def network(folder: Path) -> Qwen3VL:
    return load_model(folder, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="session")
def processor(folder: Path) -> Processor:
    return Processor.from_folder(folder, read_config(folder))


@pytest.fixture(scope="session")
def transformers_model(folder: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def backend(network: Qwen3VL, processor: Processor) -> Iterator[NativeBackend]:
    made = make_backend(network, processor)
    yield made
    made.close()


def make_backend(network: Qwen3VL, processor: Processor, **changes: int) -> NativeBackend:
    """A backend of its own over the shared network."""
    capabilities = Capabilities("tiny", CONFIG.max_model_len, True, True, 1 << 20, 4096)
    return NativeBackend(Engine(network, replace(CONFIG, **changes)), processor, capabilities)
