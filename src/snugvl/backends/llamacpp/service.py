"""A llama.cpp server behind the service protocol: see `ChildEngine`; and its chunks of `/completion` as
deltas of ours, one stream for each choice.

    {"content": …, "tokens": ids, "tokens_predicted": …, "tokens_evaluated": the prompt's, "stop": false,
     "completion_probabilities": [{"token": …, "bytes": …, "logprob": …, "top_logprobs": …}]}
    {"content": "", "stop": true, "stop_type": "eos", "limit" or "word", "stopping_word": …, "timings": …}

A token that a request stops at is known by its id; the stream is left then.

Readings of its log and counters: the log's form, every buffer that it made, the ledger, which is the plan
beside the log's buffers and what its processes hold. Lines are those of llama.cpp in October 2026; older ones
lack the time before them.
"""

import asyncio
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from typing import Any, ClassVar, Final

import psutil

from snugvl.backends.child.answer import Chunks, ReasoningSyntax, reasoning_of
from snugvl.backends.child.http import ChildApi, Served
from snugvl.backends.child.life import Launch, Life
from snugvl.backends.child.requests import NO_RUNS, ServedModel
from snugvl.backends.child.service import ChildEngine, Prepared, Session
from snugvl.backends.child.settings import Facts, flag_value
from snugvl.backends.child.watch import Gauge, samples
from snugvl.backends.llamacpp import settings
from snugvl.backends.llamacpp.facts import (
    GgufModel,
    LlamacppApi,
    ServedGguf,
    complete,
    read_model,
    template_of,
)
from snugvl.backends.llamacpp.requests import (
    COMPLETION,
    RequestBuilder,
    bodies,
    check_length,
    conversation,
    form_of,
    prompt_of,
    tokens_of,
)
from snugvl.backends.llamacpp.settings import LlamacppChoice
from snugvl.backends.preparers import Preparation
from snugvl.backends.spawned import Log, LogForm
from snugvl.core.ledger import Ledger, LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.messages import Delta, Logprob, Request, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.core.service import Load, Snapshot, Tokens
from snugvl.core.sizes import MIB
from snugvl.errors import EngineError

NO_SPECIAL: Final = ("special", "skip_special_tokens: llama.cpp leaves control tokens out")
# What the server decides itself. A user's words for them would be overruled in silence.
OURS: Final = ("--host", "--port", "--api-key", "--alias", "-a")
ADDED: Final = ("--metrics", "-lv", "4")  # its counters; and a log that names every buffer
MAX_QUOTED: Final = 200
_FINISH: Mapping[str, Any] = {"limit": "length", "eos": "stop", "word": "stop", "none": "stop"}
# What the plan calls a buffer → the line of it: its device, where the line has one, and its size in MiB.
BUFFERS: Final[Mapping[str, str]] = {
    Kind.WEIGHTS: r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB",
    Kind.CACHE: r"llama_kv_cache\w*: +(\S+) KV buffer size = +([\d.]+) MiB",
    Kind.STATES: r"(\S+) RS buffer size = +([\d.]+) MiB",
    "compute buffer": r"sched_reserve: +(\S+) compute buffer size = +([\d.]+) MiB",
    "output buffer": r"llama_context: +(\S+) +output buffer size = +([\d.]+) MiB",
    "vision tower": r"load_hparams: model size:() +([\d.]+) MiB",
    "mmproj compute buffer": r"reserve_compute_meta: +(\S+) compute buffer size = +([\d.]+) MiB",
}
_TOWER_DEVICE: Final = re.compile(r"clip_ctx: CLIP using (\S+) backend")

FORM: Final = LogForm(
    r"^(?:[\d.]{10,16} [A-Z] )?",
    r"(?:\w+ +\w+: )?(?:error\b|.*\b(?:failed|error:|GGML_ASSERT|out of memory)|exception|terminate called)",
    (
        (r"build_info|system_info", "llama.cpp reads its arguments", 0.05, 0.05),
        (r"loaded meta data", "llama.cpp knows the model", 0.10, 0.10),
        (r"load_tensors: loading model tensors", "loading the weights", 0.20, 0.20),
        (r"model buffer size", "loading the weights", 0.50, 0.50),
        (r"llama_context: constructing", "making room for contexts", 0.60, 0.60),
        (r"warming up the model", "running an empty step", 0.70, 0.70),
        (r"clip_model_loader: model name|clip_ctx:", "loading the vision tower", 0.80, 0.80),
        (r"model loaded|server is listening|all slots are idle", "the server starts", 0.98, 0.98),
    ),
    chatty=True,
)


def read_buffers(lines: Iterable[str]) -> dict[tuple[str, str], int]:
    """Bytes of each buffer by its name and its device ("CPU" for all of host memory)."""
    text = "\n".join(lines)
    tower = _TOWER_DEVICE.search(text)
    found: dict[tuple[str, str], int] = {}
    for name, pattern in BUFFERS.items():
        for device, size in re.findall(pattern, text):
            where = device or (tower[1] if tower else "CPU")
            key = name, "CPU" if where.startswith("CPU") or where.endswith("_Host") else where
            found[key] = found.get(key, 0) + round(float(size) * MIB)
    return found


REST: Final = "libraries and the rest"
TOWER: Final = "vision tower"
# The counter → the field of `Load`.
_FIELDS: Final = {
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "llamacpp:tokens_predicted_total": "generated_tokens",
    "llamacpp:prompt_tokens_cached_total": "prefix_hit_tokens",
}


def read_load(text: str, slots: int, context_tokens: int) -> Load:
    """Load by the counters. A block is the context of one slot: they share nothing."""
    found: dict[str, Any] = {
        _FIELDS[name]: int(value) for name, _, value in samples(text, _FIELDS.__contains__)
    }
    queried = found.get("prompt_tokens", 0) + found.get("prefix_hit_tokens", 0)
    return Load(
        num_blocks=slots,
        free_blocks=max(slots - found.get("running", 0), 0),
        block_size=context_tokens,
        prefix_query_tokens=queried,
        draft_method="",
        **found,
    )


class LlamacppGauge(Gauge):
    """The ledger of one llama.cpp server, of the GPU where buffers are on one, else of host memory."""

    kinds: ClassVar = {TOWER: Kind.VISION, REST: Kind.CONTEXT}

    def __init__(
        self,
        planned: Sequence[LedgerRow],
        buffers: Mapping[tuple[str, str], int],
        gpu_uuids: Sequence[str],
        device: str,
    ) -> None:
        """`buffers`: see `read_buffers`."""
        super().__init__(planned, gpu_uuids, device)
        on_gpu = any(where != "CPU" for _, where in buffers)
        self._buffers: dict[str, int] = {}
        for (name, where), nbytes in buffers.items():
            if (where != "CPU") == on_gpu:
                self._buffers[name] = self._buffers.get(name, 0) + nbytes

    @staticmethod
    def row_of(planned: LedgerRow) -> str:
        if planned.kind.group is Kind.WEIGHTS:
            return TOWER if planned.kind is Kind.VISION else Kind.WEIGHTS
        return planned.name if planned.name in BUFFERS else REST

    def read(self, family: Sequence[psutil.Process]) -> Ledger:
        """The ledger now. Takes milliseconds: call it in a thread."""
        held = self.held_by(family)
        # Weights that are mapped from the file are there once they were read.
        rest = max(held.held - sum(self._buffers.values()), 0)
        return self.ledger(held, {**self._buffers, REST: rest} if self._buffers else {})


@dataclass(slots=True)
class _LlamacppLife:
    """Own data about a life of llama.cpp (`Session.own`)."""

    gauge: LlamacppGauge
    speaker: RequestBuilder


class LlamacppEngine(ChildEngine):
    """An `EngineService` whose engine is llama.cpp's server."""

    name: ClassVar = "llama.cpp"
    backend: ClassVar = "llamacpp"
    ignores: ClassVar = (NO_SPECIAL, NO_RUNS)
    ours: ClassVar = OURS
    _command: settings.LlamacppCommand | None = None
    _gguf = GgufModel(Facts())

    async def launch(self) -> Launch:
        choice: LlamacppChoice = self._choice
        if self._command is None and not choice.attach:
            self._command = await asyncio.to_thread(settings.find, choice.command)
        found = self._command

        def words(address: str) -> tuple[str, ...]:
            assert found is not None
            return (*found.words, "--host", address, "--alias", choice.name, *ADDED, *choice.arguments)

        def environment(key: str) -> dict[str, str]:
            return {"LLAMA_API_KEY": key, **dict(choice.environment)}

        def stalled(how: str, written: Log) -> EngineError:
            last = f'its last line: "{shorten(written.last, MAX_QUOTED)}"' if written.last else "no line yet"
            return EngineError(
                f"llama.cpp hung at its start: {how}; {last}; look whether the disk answers and others "
                "hold the GPU (snugvl doctor), and start again"
            )

        start = "llama-server -m FILE.gguf"
        return Launch(choice, start, LlamacppApi, FORM, words, environment, stalled)

    def start_words(self) -> tuple[str, ...]:
        return (settings.PROGRAM,)

    async def read_facts(self, served: Served) -> Facts:
        assert isinstance(served, ServedGguf)
        choice: LlamacppChoice = self._choice
        file = flag_value(choice.arguments, "-m") or served.root
        projector = flag_value(choice.arguments, "--mmproj") or ("its own" if served.sees else None)
        if "--no-mmproj" in choice.arguments:
            projector = None
        self._gguf = await asyncio.to_thread(read_model, file, projector, choice.arguments)
        read, told = self._gguf.facts, choice.facts or Facts()
        facts = replace(
            read,
            thinking=told.thinking,
            device=told.device,
            gpu_uuids=told.gpu_uuids,
            card=told.card,
            plan=told.plan,
            parameters=told.parameters,
            exact_forms=self._guided,
        )
        return complete(facts, served, template_of(served))

    async def begin(self, life: Life, served: Served, model: ServedModel) -> _LlamacppLife:
        assert isinstance(served, ServedGguf)
        choice: LlamacppChoice = self._choice
        buffers = await asyncio.to_thread(read_buffers, life.log)
        gauge = LlamacppGauge(choice.planned, buffers, model.facts.gpu_uuids, model.facts.device)
        template = template_of(served)
        return _LlamacppLife(
            gauge, RequestBuilder(model, self._gguf, served, template, self._guided, choice.prefix_cache)
        )

    @property
    def _guided(self) -> bool:
        """Whether it surely has llguidance: others may, and some end at once when they are asked."""
        return self._command is not None and self._command.guided

    async def prepare(self, request: Request, session: Session, preparation: Preparation) -> Prepared:
        speaker: RequestBuilder = session.own.speaker
        weight = self._preparers.weigh(request)
        make = partial(prompt_of, request, speaker, preparation.go_on)
        prompt = await self._preparers.run(preparation, make, weight)
        constrain = partial(form_of, request, speaker, self._trials, preparation.go_on)
        form = await self._preparers.run(preparation, constrain)
        ids = await tokens_of(prompt, _api(session), speaker.served)
        check_length(request, len(ids), speaker.model.context_tokens)
        made = await asyncio.to_thread(bodies, request, prompt, ids, form, speaker)
        reasoning = reasoning_of(request, speaker.model.facts)
        chunks = LlamacppChunks(request.sampling, len(ids), prompt.image_tokens, reasoning)
        return Prepared(COMPLETION, made, chunks)

    async def measure(self, session: Session) -> Snapshot:
        own: _LlamacppLife = session.own
        served = own.speaker.served
        load = read_load(await session.api.metrics(), served.slots, served.context_tokens)
        ledger = await asyncio.to_thread(own.gauge.read, session.life.family())
        return Snapshot(time.time(), ledger, load)

    async def tokenize(self, request: Request) -> Tokens:
        session, preparation = self._require_session(), Preparation()
        speaker: RequestBuilder = session.own.speaker
        if isinstance(request.prompt, str):
            return Tokens(await _api(session).tokens(request.prompt))
        variables = speaker.model.facts.thinking.template(request)
        make = partial(conversation, request.messages, request.tools, speaker, variables, preparation.go_on)
        made = await self._preparers.run(preparation, make)
        return Tokens(await tokens_of(made, _api(session), speaker.served), made.image_tokens)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        return await _api(self._require_session()).text_of(ids)


def _api(session: Session) -> LlamacppApi:
    assert isinstance(session.api, LlamacppApi)
    return session.api


class LlamacppChunks(Chunks):
    """Reads the chunks of one request: see `Chunks`."""

    engine: ClassVar = "llama.cpp"

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_tokens: int,
        image_tokens: int,
        reasoning: ReasoningSyntax | None,
    ) -> None:
        """`prompt_tokens`: as counted before; where that couldn't be, llama.cpp's own count is taken."""
        super().__init__(sampling, reasoning)
        self._prompt_tokens, self._image_tokens = prompt_tokens, image_tokens
        self._held: dict[int, tuple[Logprob, ...]] = {}  # of tokens whose text hasn't come
        self._stopped: tuple[int, str] | None = None  # a token, and the text that it ended

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._count(), self._image_tokens)

    def ended(self, answer: int) -> bool:
        """Whether a choice has ended."""
        return answer not in self._unfinished

    def over(self, answer: int) -> bool:
        """Whether a token ended it that llama.cpp would go on after."""
        return self.ended(answer)

    async def settle(self, api: ChildApi) -> None:
        """Take the text of the token that ended a choice off the end of its text."""
        if self._stopped is None:
            return
        token, said = self._stopped
        self._stopped = None
        text = str((await api.call("/detokenize", {"tokens": [token]})).get("content", ""))
        assert self._last is not None
        self._last = replace(self._last, text=said.removesuffix(text), stop=text)

    def _read(self, chunk: Mapping[str, Any], answer: int) -> Iterator[Delta]:
        final = bool(chunk["stop"])
        text, tokens = str(chunk["content"]), chunk.get("tokens") or []
        self._generated[answer] = int(chunk["tokens_predicted"])
        self._prompt_tokens = max(self._prompt_tokens, int(chunk["tokens_evaluated"]))
        stopped = next((token for token in tokens if token in self._stop_ids), None)
        logprobs = tuple(self._logprob(item) for item in chunk.get("completion_probabilities") or ())
        logprobs = self._held.pop(answer, ()) + logprobs
        if stopped is not None or (final and chunk["stop_type"] == "eos"):
            logprobs = logprobs[:-1]
        elif not text and not final:  # it may be the model's own end, which is not text
            self._held[answer], logprobs = logprobs, ()
        finish: Any = "stop" if stopped is not None else _FINISH[chunk["stop_type"]] if final else None
        if finish is None or stopped is None:
            text, reasoning = self._parts(text, answer, last=finish is not None)
        else:
            reasoning = ""
        generated = self._count()
        delta = Delta(text, answer, logprobs, reasoning=reasoning, completion_tokens=generated)
        if finish is None:
            if text or reasoning or logprobs:
                yield from self._copied(delta)
            return
        self._unfinished.discard(answer)
        if final:
            self._cached = int((chunk.get("timings") or {}).get("cache_n") or 0)
        if self._last is not None:
            yield replace(self._last, completion_tokens=generated)
        self._last = replace(delta, finish_reason=finish, stop=chunk.get("stopping_word") or None)
        if stopped is not None:
            self._stopped = stopped, text
