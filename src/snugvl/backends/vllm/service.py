"""A vLLM server behind the service protocol: see `ChildEngine`; and its chunks as deltas of ours.

    {"choices": [{"index": 0, "delta": {"content": …} or "text": …, "logprobs": …, "finish_reason": …,
                  "stop_reason": a stop string or a token id}], "usage": …}   … and last one with the usage

The usage comes after everything, and belongs to the last delta: the last end of a choice waits for it.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar, Final

from snugvl.backends.child.answer import Chunks, ReasoningSyntax, reasoning_of
from snugvl.backends.child.http import CALL_S, ChildApi, Foreign, Served, object_of
from snugvl.backends.child.life import Launch, Life
from snugvl.backends.child.requests import ServedModel, refuse_control_tokens
from snugvl.backends.child.service import ChildEngine, Prepared, Session
from snugvl.backends.child.settings import Facts, flag_value
from snugvl.backends.preparers import Preparation
from snugvl.backends.spawned import Log
from snugvl.backends.vllm import settings
from snugvl.backends.vllm.measure import FORM, Measured, VllmGauge, read_counters, read_measurements
from snugvl.backends.vllm.requests import body_of, rename_field, tokenize_body
from snugvl.backends.vllm.settings import OURS, VllmChoice, apply_limits, common_flags, read_facts
from snugvl.checkpoint.locate import POCKET
from snugvl.core.messages import Delta, Logprob, Request, TokenLogprob, Usage
from snugvl.core.sampling import SamplingParams
from snugvl.core.service import Snapshot, Tokens
from snugvl.errors import EngineError, RequestError, SnugvlError

logger = logging.getLogger("snugvl.vllm")

SLEEP_POLL_S = 1.0
MOVE_S = 600.0  # moving or reading all weights may take
MAX_QUOTED: Final = 200  # characters of a line of the log
LOADING: Final = 0.2  # of a start: its weights are there (see `log`)
_FINISH: Mapping[str, Any] = {"stop": "stop", "length": "length", "abort": "abort", "tool_calls": "stop"}


class VllmApi(ChildApi):
    """Talks to one vLLM."""

    name: ClassVar = "vLLM"
    too_large: ClassVar = (
        "maximum context length", "maximum model length", "max_model_len", "encoder cache size"
    )  # fmt: skip

    async def served(self, wanted: str) -> Served:
        listed = [
            card
            for card in await self.cards()
            if isinstance(card, dict)
            and isinstance(card.get("id"), str)
            and isinstance(card.get("max_model_len"), int)
        ]
        version = object_of(await self.get("/version", CALL_S)).get("version")
        if not listed or not isinstance(version, str):
            asked = "GET /v1/models" if not listed else "GET /version"
            raise self.foreign(f"{asked} was not answered as vLLM does")
        cards = [card for card in listed if wanted in ("", card["id"])]
        if not cards:
            names = ", ".join(card["id"] for card in listed)
            raise Foreign(f"the vLLM at {self.where} serves {names}, not {wanted}")
        root = cards[0].get("root")
        return Served(
            cards[0]["id"], root if isinstance(root, str) else "", cards[0]["max_model_len"], version
        )

    async def text_tokens(self, text: str) -> tuple[int, ...]:
        return await self.ids_of({"prompt": text, "add_special_tokens": False})


class Sleeper:
    """Frees the GPU's memory while there are no requests (vLLM's sleep mode), and takes it for the next one.

    awake ── idle for so long ──► POST /sleep ──► asleep ── a request ──► POST /wake_up ──► awake

    Level 1 keeps the weights in host memory. Level 2 drops them too; then waking reads them from disk again.
    """

    def __init__(self, api: VllmApi, after_s: float, level: int, busy: Callable[[], bool]) -> None:
        """`busy`: whether requests are under way or wait for it to wake."""
        self._api = api
        self._after_s = after_s
        self._level = level
        self._busy = busy
        self._lock = asyncio.Lock()
        self.asleep = False

    async def doze(self) -> None:
        """Put vLLM to sleep whenever nothing ran for long enough. Returns only where vLLM can't sleep."""
        busy_at = time.monotonic()
        pause_s = min(SLEEP_POLL_S, self._after_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            if self._busy() or self.asleep:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at >= self._after_s:
                try:
                    await self._sleep()
                except SnugvlError as error:
                    logger.warning("vLLM can't sleep, so it stays awake: %s", error)
                    return

    async def wake(self) -> None:
        """Wake vLLM if it sleeps, and wait until it is awake.

        Raises:
            EngineError: it can't wake up.
        """
        async with self._lock:
            if not self.asleep:
                return
            if self._level == 1:
                await self._api.call("/wake_up", timeout_s=MOVE_S)
            else:
                await self._api.call("/wake_up?tags=weights", timeout_s=MOVE_S)
                await self._api.call("/collective_rpc", {"method": "reload_weights"}, timeout_s=MOVE_S)
                await self._api.call("/wake_up?tags=kv_cache", timeout_s=MOVE_S)
            self.asleep = False

    async def _sleep(self) -> None:
        async with self._lock:
            if self._busy():  # one came meanwhile
                return
            await self._api.call(f"/sleep?level={self._level}", timeout_s=MOVE_S)
            self.asleep = True


@dataclass(slots=True)
class _VllmLife:
    """Own data about a life of vLLM (`Session.own`)."""

    gauge: VllmGauge
    measured: Measured
    sleeper: Sleeper | None


class VllmEngine(ChildEngine):
    """An `EngineService` whose engine is a vLLM server."""

    name: ClassVar = "vLLM"
    backend: ClassVar = "vllm"
    ours: ClassVar = OURS
    vague_limits: ClassVar = True
    _command: settings.VllmCommand | None = None

    async def launch(self) -> Launch:
        choice: VllmChoice = self._choice
        if self._command is None and not choice.attach:
            self._command = await asyncio.to_thread(settings.find, choice.command)
            if self._command.doubt is not None:
                logger.warning("%s", self._command.doubt)
        found, sleeps = self._command, choice.sleep_after_s is not None

        def words(address: str) -> tuple[str, ...]:
            assert found is not None
            return found.serve(
                choice.folder, (*common_flags(choice.name, address, sleeps), *choice.arguments)
            )

        def environment(key: str) -> dict[str, str]:
            sleep = {"VLLM_SERVER_DEV_MODE": "1"} if sleeps else {}
            return {"VLLM_API_KEY": key, **sleep, **dict(choice.environment)}

        def stalled(how: str, written: Log) -> EngineError:
            return _stall_error(how, written, choice)

        return Launch(choice, "vllm serve MODEL", VllmApi, FORM, words, environment, stalled)

    def start_words(self) -> tuple[str, ...]:
        return ("vllm", "serve", self._choice.model)

    async def read_facts(self, served: Served) -> Facts:
        facts = self._choice.facts
        if facts is None:
            facts = await asyncio.to_thread(read_facts, self._choice.model or served.root)
        return apply_limits(facts, self._choice.arguments)

    async def begin(self, life: Life, served: Served, model: ServedModel) -> _VllmLife:
        choice: VllmChoice = self._choice
        sleeper = None
        if choice.sleep_after_s is not None:
            assert isinstance(life.api, VllmApi)
            sleeper = Sleeper(life.api, choice.sleep_after_s, choice.sleep_level, lambda: self.busy)
        gauge = VllmGauge(choice.planned, model.facts.gpu_uuids, model.facts.device)
        return _VllmLife(gauge, await asyncio.to_thread(read_measurements, life.log), sleeper)

    async def prepare(self, request: Request, session: Session, preparation: Preparation) -> Prepared:
        make = partial(body_of, request, session.model, self._trials, preparation.go_on)
        body = await self._preparers.run(preparation, make, self._preparers.weigh(request))
        if request.prompt is not None and request.sampling.max_tokens is None:
            await self.awake(session)
            body.fields["max_tokens"] = await self._room(request.prompt, session)
        data = await asyncio.to_thread(body.encoded)
        prompt = request.prompt if request.sampling.prompt_logprobs else None  # vLLM echoes its text
        if isinstance(prompt, tuple):
            prompt = await self.detokenize(prompt)
        chunks = VllmChunks(request.sampling, reasoning_of(request, session.model.facts), prompt or "")
        return Prepared(body.path, (data,), chunks)

    async def measure(self, session: Session) -> Snapshot:
        own: _VllmLife = session.own
        counters = read_counters(await session.api.metrics())
        ledger = await asyncio.to_thread(
            lambda: own.gauge.read(own.measured, counters, session.life.family())
        )
        return Snapshot(time.time(), ledger, counters.load)

    async def awake(self, session: Session) -> None:
        if session.own.sleeper is not None:
            await session.own.sleeper.wake()

    async def beside(self, session: Session) -> None:
        if session.own.sleeper is not None:
            await session.own.sleeper.doze()

    def asleep(self, session: Session) -> str | None:
        sleeper: Sleeper | None = session.own.sleeper
        if sleeper is None or not sleeper.asleep:
            return None
        return f"{self._choice.name} sleeps: its GPU memory is given back; the next request wakes it"

    def refused(self, error: RequestError, request: Request) -> RequestError:
        return rename_field(error, request)

    async def tokenize(self, request: Request) -> Tokens:
        session, preparation = self._require_session(), Preparation()
        make = partial(tokenize_body, request, session.model, preparation.go_on)
        ids = await session.api.ids_of(await self._preparers.run(preparation, make))
        pictures = ids.count(session.model.facts.image_token) if request.messages else 0
        return Tokens(ids, pictures)

    async def detokenize(self, ids: tuple[int, ...]) -> str:
        session = self._require_session()
        answer = await session.api.call("/detokenize", {"model": session.model.name, "tokens": list(ids)})
        return str(answer.get("prompt", ""))

    async def _room(self, prompt: str | tuple[int, ...], session: Session) -> int:
        """Number of tokens that the context leaves for the answer to a bare prompt."""
        length = len(prompt)
        if isinstance(prompt, str):
            refuse_control_tokens(prompt, session.model.facts, "prompt")
            body = {"model": session.model.name, "add_special_tokens": False, "prompt": prompt}
            length = len(await session.api.ids_of(body))
        return max(session.model.context_tokens - length, 1)


def _stall_error(how: str, written: Log, choice: VllmChoice) -> EngineError:
    """The error of a start that does nothing any more. `how`: since when, as a clause."""
    last = (
        f'its last line: "{shorten(written.last, MAX_QUOTED)}"' if written.last else "it has written no line"
    )
    remote = choice.model != POCKET and not Path(choice.model).is_dir()
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
    if any(flag_value(choice.arguments, size) not in (None, "1") for size in sizes):
        hint = (
            "GPUs that can't reach each other directly stop like this: try the environment variable "
            "NCCL_P2P_DISABLE=1, or one GPU"
        )
    elif remote and (written.stage is None or written.stage.progress < LOADING):
        hint = (
            "it may wait for the network, or for another program that downloads the same model: run "
            f"`snugvl pull {choice.model}` first, then start with the environment variable HF_HUB_OFFLINE=1"
        )
    else:
        hint = "look whether other programs hold the GPU (snugvl doctor), and start again"
    debug = shlex.join(["VLLM_LOGGING_LEVEL=DEBUG", "vllm", "serve", choice.model, *choice.arguments])
    return EngineError(f"vLLM hung at its start: {how}; {last}; {hint}; its own command says more: {debug}")


class VllmChunks(Chunks):
    """Reads the chunks of one request: see `Chunks`."""

    engine: ClassVar = "vLLM"

    def __init__(
        self, sampling: SamplingParams, reasoning: ReasoningSyntax | None = None, prompt: str = ""
    ) -> None:
        """`prompt`: what the answer begins with where log-probabilities of the prompt are wanted."""
        super().__init__(sampling, reasoning)
        self._prompt = prompt
        self._judges, self._judged = sampling.prompt_logprobs, False  # wanted, and told
        # Choices whose piece with the prompt hasn't come yet.
        self._unechoed = set(self._unfinished) if sampling.prompt_logprobs else set()
        self._usage = Usage(0, 0)
        self.stop_token: int | None = None  # ended the choice that was read last, and has no text yet

    @property
    def usage(self) -> Usage:
        return replace(self._usage, completion_tokens=self._usage.completion_tokens * self._copies)

    def ended(self, answer: int) -> bool:
        """Whether every choice has ended."""
        return not self._unfinished

    def over(self, answer: int) -> bool:
        """Never: the usage follows."""
        return False

    async def settle(self, api: ChildApi) -> None:
        """Ask for the text of the token that ended the choice that was read last, where one did."""
        if self.stop_token is None:
            return
        assert self._last is not None
        answer = await api.call("/detokenize", {"tokens": [self.stop_token]})
        self._last = replace(self._last, stop=str(answer.get("prompt", "")))
        self.stop_token = None

    def _read(self, chunk: Mapping[str, Any], answer: int) -> Iterator[Delta]:
        told = chunk.get("usage")
        if told is not None:
            details = told.get("prompt_tokens_details") or {}
            pictures = details.get("multimodal_tokens") or {}
            prompt, completion = int(told["prompt_tokens"]), int(told.get("completion_tokens") or 0)
            # A chunk counts the tokens of its own choice; the last one those of all.
            images = sum(int(number) for number in pictures.values())
            self._cached = int(details.get("cached_tokens") or 0)
            self._usage = Usage(prompt, max(completion, self._usage.completion_tokens), images)
        for choice in chunk.get("choices", ()):
            self._generated[int(choice["index"])] = int((told or {}).get("completion_tokens") or 0)
        for choice in chunk.get("choices", ()):
            yield from self._choice(choice)

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Delta]:
        index, finish = int(choice["index"]), choice.get("finish_reason")
        text, reasoning = self._said(choice, last=finish is not None)
        logprobs = self._logprobs(choice.get("logprobs"))
        scored: tuple[Logprob, ...] = ()
        if index in self._unechoed:  # the first piece of a choice has the prompt before it
            self._unechoed.discard(index)
            text = text.removeprefix(self._prompt)
            count = self._usage.prompt_tokens
            scored, logprobs = logprobs[:count], logprobs[count:]
            scored, self._judged = () if self._judged else scored, True
        reason = choice.get("stop_reason")
        if finish == "stop" and not isinstance(reason, str) and not self._judges:
            logprobs = logprobs[:-1]  # of the token that ended it, which is not text
        delta = Delta(
            text,
            index,
            logprobs,
            reasoning=reasoning,
            completion_tokens=self._count(),
            prompt_logprobs=scored,
        )
        if finish is None:
            if text or reasoning or logprobs:
                yield from self._copied(delta)
            return
        self._unfinished.discard(index)
        stop = reason if isinstance(reason, str) else None
        delta = replace(delta, finish_reason=_FINISH[finish], stop=stop)
        if isinstance(reason, int) and reason in self._stop_ids:
            self.stop_token = reason
        if self._last is not None:
            yield self._last
        self._last = delta

    def _said(self, choice: Mapping[str, Any], *, last: bool) -> tuple[str, str]:
        """Text and reasoning. A server with a parser of reasoning tells them apart itself."""
        if "text" in choice:
            return choice["text"] or "", ""
        index, delta = int(choice["index"]), choice.get("delta") or {}
        told = delta.get("reasoning") or delta.get("reasoning_content") or ""
        if told:
            self._splitters.pop(index, None)
            self._thought[index] = self._generated[index]
        text, reasoning = self._parts(delta.get("content") or "", index, last=last)
        return text, told + reasoning

    def _logprobs(self, value: Mapping[str, Any] | None) -> tuple[Logprob, ...]:
        """Log-probabilities of a chunk: a chat's (`content`) or a completion's (`tokens`, …)."""
        if not value:
            return ()
        if "tokens" not in value:
            return tuple(self._logprob(item) for item in value.get("content") or ())
        tops = value.get("top_logprobs") or [None] * len(value["tokens"])
        return tuple(
            Logprob(
                token,
                token.encode(),
                nan if logprob is None else float(logprob),
                _rank(top)[: self._alternatives],
            )
            for token, logprob, top in zip(value["tokens"], value["token_logprobs"], tops, strict=True)
        )


def _rank(top: Mapping[str, float] | None) -> tuple[TokenLogprob, ...]:
    pairs = sorted((top or {}).items(), key=lambda pair: -pair[1])
    return tuple(TokenLogprob(text, text.encode(), float(logprob)) for text, logprob in pairs)
