"""Our own engine, to the planner."""

from collections.abc import Iterator
from dataclasses import replace

from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.gguf_network import ours
from snugvl.core.memory_kinds import Kind
from snugvl.core.options import SPECIAL
from snugvl.core.reason import Reason
from snugvl.planner.capabilities import Option
from snugvl.planner.engines.native.checkpoints import NATIVE_STEPS, steps
from snugvl.planner.engines.native.footprint import native_components
from snugvl.planner.engines.native.options import native_options
from snugvl.planner.engines.native.step_graphs import step_graph_components
from snugvl.planner.engines.rules import EngineRules
from snugvl.planner.footprint import kv
from snugvl.planner.footprint.component import Component
from snugvl.planner.footprint.decoder import native_cpu_components
from snugvl.planner.footprint.total import Device
from snugvl.planner.footprint.vision import native_vision_components
from snugvl.planner.footprint.weights import weight_components
from snugvl.planner.inventory import Inventory, inventory
from snugvl.planner.plan import Choice
from snugvl.planner.settings import DEFAULT_SEQUENCES, Settings
from snugvl.planner.wishes import Wishes


class NativeRules(EngineRules):
    """The engine of this package."""

    engine = "native"
    title = "snugvl's own engine"
    kind = "snugvl's own (native)"
    rank = 3
    honours = SPECIAL
    own_layout = True
    has_parts = True
    pooled = True
    in_process = True

    def options(self, model: Inventory, device: Device, wishes: Wishes) -> list[Option] | Reason:
        """The model itself, or a GGUF as our engine holds it."""
        known = model if model.facts.gguf is None else inventory(ours(model.facts))
        return native_options(known, device, wishes)

    def context_limit(self, facts: ModelFacts) -> int:
        """Tokens of the longest context: our rotary embeddings may reach less far."""
        most, here = facts.text.max_position_embeddings, facts.native_positions
        return most if here is None else min(most, here)

    def at_once(self, sequences: int, concurrency: int) -> int:
        """Requests that may run at once: they share one pool."""
        return sequences

    def variants(self, model: Inventory, base: Settings, *, cpu: bool) -> Iterator[Settings]:
        """CUDA graphs always, then large chunks; on a CPU there is one."""
        if cpu:
            yield replace(base, sequences=max(DEFAULT_SEQUENCES, base.sequences))
            return
        for chunk, sequences in steps(model, base):
            if sequences >= base.sequences or (chunk, sequences) == NATIVE_STEPS[0]:
                yield replace(base, eager=False, chunk=chunk, sequences=max(sequences, base.sequences))

    def components(self, model: Inventory, settings: Settings, device: Device) -> list[Component]:
        """Weights, pool, states, pictures, and the workspace of its steps."""
        cache = kv.pool_component(model, settings)
        parts = [*weight_components(model, settings), cache, kv.state_component(model, settings)]
        parts += [kv.checkpoint_component(model, settings), kv.predictor_component(model, settings)]
        parts += native_vision_components(model, settings)
        parts.append(
            Component(
                "encoder cache", Kind.ENCODINGS, settings.encoder_cache_bytes, why="for the next question"
            )
        )
        if device.cpu:
            return parts + native_cpu_components(model, settings)
        scratch, many = device.cublas_bytes, device.multiprocessors
        parts += native_components(model, settings, cache.nbytes, scratch, many)
        return parts + step_graph_components(model, settings, scratch, many)

    def kv_component(self, model: Inventory, settings: Settings) -> Component:
        """The pool."""
        return kv.pool_component(model, settings)

    def why(self, choice: Choice) -> str | None:
        """It is the first choice."""
        return f"our own engine runs the {choice.option.model.facts.family} family, and is preferred"


RULES = NativeRules()
