"""An engine whose steps run ahead of the host on a CPU, where there are no CUDA graphs."""

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch

from snugvl.core.config import RECENT, EngineConfig
from snugvl.core.sampling import SamplingParams
from snugvl.engine.batch import likeliest
from snugvl.engine.engine import Engine
from snugvl.engine.graphs.decode import DecodeGraphs, DecodeRow
from snugvl.engine.request import EngineRequest, Sampled, TokenOutput
from snugvl.layers.attention import AttentionMetadata
from snugvl.models.batch import DraftBatch, ForwardBatch
from tests.engine.toy import Toy


class Result:
    """A run that has finished, but whose tokens are only looked at when asked for."""

    def __init__(self, logits: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        self.logits, self.bits = logits, bits

    @property
    def tokens(self) -> torch.Tensor:
        return likeliest(self.logits, self.bits)

    def results(self) -> list[Sampled]:
        return [Sampled(token if token >= 0 else None) for token in self.tokens.tolist()]


class EagerGraphs(DecodeGraphs):
    """What the graphs do, step by step on the CPU: inputs of a step come from the step before it."""

    def __init__(self, engine: Engine) -> None:
        drafter = engine._runner.drafter
        hidden = None if drafter is None else drafter.hidden
        runner = engine._runner
        super().__init__(
            engine.model, engine._cache, engine.config.max_model_len, runner.graph_cache, hidden=hidden
        )
        self.started = self.followed = 0

    def ensure(self, sequences: int) -> bool:
        return True

    def start(  # type: ignore[override]
        self, rows: Rows[DecodeRow], tokens: torch.Tensor | None = None
    ) -> Result:
        self.started += 1
        self.ids = torch.tensor([row.token for row in rows])
        if tokens is not None:
            self.feed(tokens)
        self.lengths = [row.length for row in rows]
        self.deltas = [row.delta for row in rows]
        self.tables = [list(row.table) for row in rows]
        self.state_slots = torch.tensor([row.slot for row in rows])
        return self._run()

    def advance(  # type: ignore[override]
        self, rows: int, grown: Mapping[int, tuple[int, Rows[int]]]
    ) -> Result:
        self.followed += 1
        for index, (before, blocks) in grown.items():
            assert len(self.tables[index]) == before
            self.tables[index] += blocks
        return self._run()

    def choose(self, bits: torch.Tensor) -> Result:  # type: ignore[override]
        result = Result(self.logits, bits)
        self.feed(result.tokens)
        return result

    def feed(self, tokens: torch.Tensor) -> None:
        self.ids = tokens.clamp(min=0)

    def _run(self) -> Result:
        size = self._cache.block_size
        places = [length - 1 for length in self.lengths]
        slots = [t[p // size] * size + p % size for t, p in zip(self.tables, places, strict=True)]
        width = max(map(len, self.tables))
        metadata = AttentionMetadata(
            query_lens=(1,) * len(places),
            context_lens=tuple(self.lengths),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in self.tables]),
            block_size=size,
            state_slots=self.state_slots,
        )
        positions = torch.tensor([p + d for p, d in zip(places, self.deltas, strict=True)]).expand(3, -1)
        left = None
        if self._hidden is not None:
            rows = [int(s) * RECENT + p % RECENT for s, p in zip(self.state_slots, places, strict=True)]
            left = DraftBatch(self._hidden, torch.tensor(rows))
        batch = ForwardBatch(self.ids, positions, metadata, torch.arange(len(places)), drafts=left)
        logits = self._model.forward(batch, self._cache)
        self.ids = logits.argmax(-1)
        self.lengths = [length + 1 for length in self.lengths]
        self.logits = logits
        return Result(logits)


def engine_with(graphs: bool, model: Toy | None = None, **config: int) -> tuple[Engine, EagerGraphs | None]:
    sizes = {
        "num_blocks": 40,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_batched_tokens": 16,
    }
    engine = Engine(model or Toy(), EngineConfig(**sizes | config))
    if not graphs:
        return engine, None
    eager = EagerGraphs(engine)
    engine._runner.graphs = eager
    engine._runner.has_graphs = True
    return engine, eager


def request(name: str, prompt: list[int], **sampling: object) -> EngineRequest:
    stop = frozenset(sampling.pop("stop_ids", ()))  # type: ignore[call-overload]
    return EngineRequest(name, tuple(prompt), SamplingParams(**sampling), stop_ids=stop)  # type: ignore[arg-type]


def finish(engine: Engine, outputs: list[TokenOutput] | None = None) -> dict[tuple[str, int], list[object]]:
    """Everything that comes out until nothing is left, by request and choice: tokens, then why it ended."""
    said = outputs or []
    while engine.has_work:
        said += engine.step()
        engine.check_integrity()
    found: dict[tuple[str, int], list[object]] = {}
    for output in said:
        line = found.setdefault((output.request_id, output.choice), [])
        line += [output.token_id] if output.token_id is not None else []
        line += [output.finish] if output.finish else []
    return found
