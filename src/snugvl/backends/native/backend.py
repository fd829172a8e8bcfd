"""Our engine in this process, which one thread drives."""

import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

from snugvl.backends.engine_thread import EngineWorker, Receiver, deliver, fail_all
from snugvl.backends.hosted import Hosted, PreparedRequest
from snugvl.backends.native.ahead import KernelsAhead
from snugvl.backends.native.kernel_processes import Ahead
from snugvl.core.messages import Capabilities
from snugvl.core.service import Load
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.errors import EngineError
from snugvl.inputs.prompt import PreparedPrompt, Processor
from snugvl.inputs.reasoning import PLAIN, ThinkingDefault

logger = logging.getLogger(__name__)


class NativeBackend(Hosted[PreparedPrompt]):
    """A loaded model on our engine: see `Hosted`."""

    def __init__(
        self,
        engine: Engine,
        processor: Processor,
        capabilities: Capabilities,
        thinking: ThinkingDefault = PLAIN,
        kernels: KernelsAhead | None = None,
    ) -> None:
        """`kernels`: processes that compile kernels ahead, or None."""
        super().__init__(processor, capabilities, thinking)
        self._engine = engine
        self._receivers: dict[str, Receiver] = {}  # touched by the engine's thread only
        self._ids = count()
        self._kernels = kernels or KernelsAhead()
        self._graphs_ahead = False  # whether some are to be recorded before they are needed
        # The worker must not hold this backend: dropped without `close`, it stops its thread, also at exit.
        self._worker = EngineWorker(
            engine,
            partial(deliver, engine.abort, self._receivers),
            partial(fail_all, self._receivers),
            ended=engine.close,
        )
        weakref.finalize(self, self._worker.close)

    def memory(self) -> Mapping[str, int]:
        return self._worker.call(self._engine.memory)

    def stats(self) -> Load:
        return self._worker.call(self._stats)

    def settle(self, ahead: Ahead) -> None:
        """Requests are taken: let what later ones would wait for be done beside them."""
        self._graphs_ahead = ahead == "graphs"

    def warm_up(self) -> bool:
        """Prepare grammars, for which a first request would stall all others; then, if wished, CUDA graphs.

        One graph a call, and only when kernels are compiled: a request that comes meanwhile waits for it.
        """
        super().warm_up()
        if self._graphs_ahead and self._kernels.finished.is_set():
            try:
                self._graphs_ahead = self._worker.call(lambda: self._engine.capture_next())
            except Exception:
                logger.exception("a CUDA graph can't be recorded ahead; each is when it is needed")
                self._graphs_ahead = False
        return self._graphs_ahead

    def close(self) -> None:
        self._kernels.stop()
        self._grammars.close()
        self._worker.close()
        fail_all(self._receivers, EngineError("the model was closed while this request was running"))
        self._engine.close()  # once more: where a bug ended its thread, the error held tensors until now

    def abort(self, request_id: str) -> None:
        """End a request and free what it holds; unknown ids are ignored."""
        self._worker.post(lambda: self._abort(request_id))

    def _begin(self, ready: PreparedRequest[PreparedPrompt]) -> Callable[[], object]:
        request = EngineRequest(
            request_id=str(next(self._ids)),
            prompt_ids=ready.prompt.prompt_ids,
            sampling=ready.request.sampling,
            vision=ready.prompt.vision,
            stop_ids=ready.stop_ids,
            deadline=ready.deadline,
            grammar=ready.grammar,
        )
        abort = partial(self.abort, request.request_id)
        try:
            self._worker.call(lambda: self._add(request, ready.receiver))
        except BaseException:  # Ctrl+C while this thread waited: it may have been accepted all the same
            abort()
            raise
        return abort

    def _stats(self) -> Load:
        self._engine.poll_memory()  # an engine that idles makes no steps, in which it would
        return self._engine.stats

    def _add(self, request: EngineRequest, receiver: Receiver) -> None:
        self._engine.add(request)
        self._receivers[request.request_id] = receiver

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)
        receiver = self._receivers.pop(request_id, None)
        if receiver is not None:
            receiver.mailbox.close()
