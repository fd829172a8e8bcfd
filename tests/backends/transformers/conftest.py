"""Loaded tiny checkpoints, each once a session, and transformers' own `generate` beside them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from snugvl.backends.protocol import Message
from snugvl.backends.transformers.backend import TransformersBackend
from snugvl.backends.transformers.engine import Limits, TransformersEngine
from snugvl.backends.transformers.loading import load_engine
from snugvl.backends.transformers.row import ModelPrompt, ModelRequest
from snugvl.sampling import SamplingParams
from tests.backends.transformers import families
from tests.inputs.conftest import checkpoint, video_oracle  # noqa: F401 - fixtures

CPU = torch.device("cpu")
NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


class Opened:
    """A loaded checkpoint with its insides at hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.loaded = load_engine(folder, **{"device": "cpu", "context": 1024, **options})
        self.backend: TransformersBackend = self.loaded.backend
        self.preparer = self.backend._preparer
        self.model: Any = self.backend._engine.model

    def engine(self, **limits: int) -> TransformersEngine:
        """An engine of its own over the shared network, stepped by the test."""
        values = {"context": 1024, "rows": 8, "cache_tokens": 8192} | limits
        return TransformersEngine(self.model, Limits(**values), CPU, torch.float32)

    def prompt(self, *messages: Message) -> ModelPrompt:
        """A conversation as the network takes it."""
        return self.preparer.prepare(messages)

    def expected(self, prompt: ModelPrompt, count: int = NEW_TOKENS) -> list[int]:
        """What `generate` says alone."""
        output = self.model.generate(
            **prompt.inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, len(prompt.prompt.prompt_ids) :].tolist()  # type: ignore[no-any-return]


def request(
    name: str, prompt: ModelPrompt, sampling: SamplingParams = GREEDY, **changes: Any
) -> ModelRequest:
    made = ModelRequest(name, prompt, sampling, frozenset(), None, None, frozenset(prompt.prompt.prompt_ids))
    return replace(made, **changes)


def run(
    engine: TransformersEngine, requests: list[ModelRequest], *, late: tuple[str, ...] = (), after: int = 3
) -> dict[str, list[int]]:
    """Tokens of each choice by "name" or "name/choice"; requests in `late` come after so many steps."""
    tokens: dict[str, list[int]] = {}
    for each in requests:
        if each.request_id not in late:
            engine.add(each)
    steps = 0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            assert output.token_id is not None
            name = f"{output.request_id}/{output.choice}" if output.choice else output.request_id
            tokens.setdefault(name, []).append(output.token_id)
        steps += 1
        if steps == after:
            for each in requests:
                if each.request_id in late:
                    engine.add(each)
    assert engine.stats.faults == 0, "a batch failed, and its rows ran again alone"
    return tokens


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Opened]]:
    opened: dict[str, Opened] = {}

    def get(name: str) -> Opened:
        if name not in opened:
            make = {**families.SEEING, **families.TEXTS}[name]
            opened[name] = Opened(make(tmp_path_factory.mktemp(name)))
        return opened[name]

    yield get
    for each in opened.values():
        each.backend.close()


@pytest.fixture(scope="session")
def qwen(folder: Path) -> Iterator[Opened]:
    """The checkpoint that our own engine's tests run."""
    made = Opened(folder)
    yield made
    made.backend.close()
