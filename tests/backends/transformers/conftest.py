"""Loaded tiny checkpoints, each once a session, and transformers' own `generate` beside them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from snugvl.backends.engine_thread import Receiver
from snugvl.backends.transformers.backend import TransformersBackend
from snugvl.backends.transformers.engine import TransformersEngine
from snugvl.backends.transformers.loading import LoadedTransformers
from snugvl.backends.transformers.loading import load_engine as load_with
from snugvl.backends.transformers.sampling import GenerationRequest, ModelPrompt
from snugvl.core.messages import Delta, Message
from snugvl.core.options import LoadOptions
from snugvl.core.sampling import SamplingParams
from snugvl.engine.request import TokenOutput
from snugvl.inputs.tokenizer import Tokenizer
from tests.backends.transformers import families
from tests.inputs.conftest import checkpoint, video_oracle  # noqa: F401 - fixtures

CPU = torch.device("cpu")
NEW_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def load_engine(
    model: str | Path, *, placement: tuple[tuple[str, str], ...] = (), **options: Any
) -> LoadedTransformers:
    """With options by name."""
    return load_with(LoadOptions(str(model), **options), placement=placement)


class Opened:
    """A loaded checkpoint with its insides at hand."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.loaded = load_engine(folder, **{"device": "cpu", "context": 1024, **options})
        self.backend: TransformersBackend = self.loaded.backend
        self.preparer = self.backend._prompts
        self.model: Any = self.backend._engine.model

    @contextmanager
    def engine(self, **limits: int) -> Iterator[TransformersEngine]:
        """An engine of its own over the shared network."""
        engine = TransformersEngine(self.model, CPU, torch.float32, **{"context": 1024} | limits)
        try:
            yield engine
        finally:
            engine.close()

    def job(self, prompt: ModelPrompt, sampling: SamplingParams = GREEDY, **changes: Any) -> "Asked":
        """A request that keeps its tokens."""
        return Asked(self.preparer.tokenizer, prompt, sampling, **changes)

    def prompt(self, *messages: Message) -> ModelPrompt:
        """A conversation as the network takes it."""
        return self.preparer.prepare(messages)

    def expected(self, prompt: ModelPrompt, count: int = NEW_TOKENS) -> list[int]:
        """What `generate` says alone."""
        output = self.model.generate(
            **prompt.inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return output[0, len(prompt.prompt_ids) :].tolist()  # type: ignore[no-any-return]


class Kept(Receiver):
    """A receiver that keeps the tokens of each choice. `seen` is called with every one of them."""

    def __init__(self, tokenizer: Tokenizer, prompt: ModelPrompt, sampling: SamplingParams) -> None:
        super().__init__(tokenizer, prompt, sampling, frozenset())
        self.tokens: dict[int, list[int]] = {}
        self.seen: Callable[[TokenOutput], None] = lambda _: None

    def receive(self, output: TokenOutput) -> bool:
        assert output.token_id is not None
        self.tokens.setdefault(output.choice, []).append(output.token_id)
        self.seen(output)
        return super().receive(output)


class Asked(GenerationRequest):
    """A request with a receiver that keeps tokens."""

    receiver: Kept

    def __init__(
        self, tokenizer: Tokenizer, prompt: ModelPrompt, sampling: SamplingParams, **changes: Any
    ) -> None:
        super().__init__(prompt, sampling, frozenset(), Kept(tokenizer, prompt, sampling), **changes)

    def wait(self) -> list[Delta]:
        """The whole answer, or what ended it."""
        deltas = []
        while (delta := self.receiver.mailbox.get()) is not None:
            deltas.append(delta)
        return deltas

    @property
    def tokens(self) -> list[int]:
        """Of the one choice."""
        return self.receiver.tokens[0]


def run(engine: TransformersEngine, jobs: dict[str, Asked]) -> dict[str, list[int]]:
    """Tokens of each request; all are queued before the first is read."""
    for job in jobs.values():
        engine.submit(job)
    for job in jobs.values():
        job.wait()
    assert engine.stats().faults == 0
    return {name: job.tokens for name, job in jobs.items()}


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
