"""A plan as llama.cpp is started with it."""

from dataclasses import replace

from snugvl.backends.child.settings import Facts, Replan
from snugvl.backends.llamacpp.settings import LlamacppChoice
from snugvl.core.ledger import LedgerRow
from snugvl.core.options import LoadOptions
from snugvl.diagnose.facts import Card
from snugvl.inputs.reasoning import PLAIN
from snugvl.planner.commands import visible
from snugvl.planner.llamacpp_flags import llamacpp_arguments
from snugvl.planner.plan import Choice


def llamacpp_choice(
    choice: Choice,
    load: LoadOptions,
    *,
    command: tuple[str, ...] = (),
    retry: bool = True,
    replan: Replan | None = None,
) -> LlamacppChoice:
    """The server of a plan. `command`, `retry`, `replan`: see `ChildChoice`."""
    facts = Facts(
        thinking=replace(PLAIN, said=load.thinking),
        device=choice.budget.name,
        parameters=choice.option.model.parameters,
        gpu_uuids=tuple(gpu.uuid for gpu in choice.gpus if gpu.uuid is not None),
        card=Card(choice.budget.total_bytes, choice.budget.free_bytes),
    )
    return LlamacppChoice(
        choice.option.model.name,
        arguments_of(choice),
        command=command or None,
        environment=visible(choice),
        facts=facts,
        planned=planned_rows(choice),
        retry=retry,
        replan=replan,
        prefix_cache=load.prefix_cache,
    )


def arguments_of(choice: Choice) -> tuple[str, ...]:
    """The words behind `llama-server`: files and flags."""
    return tuple(llamacpp_arguments(choice)[1:])


def planned_rows(choice: Choice) -> tuple[LedgerRow, ...]:
    """The plan as rows of the ledger."""
    return tuple(LedgerRow(part.name, part.nbytes) for part in choice.footprint.counted if part.nbytes)
