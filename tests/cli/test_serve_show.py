"""What `snugvl serve` says once the engine is there, and that the plan which it printed is what it sends."""

from dataclasses import replace

import pytest

from snugvl.backends.process.supervised import SupervisedEngine
from snugvl.checkpoint.read import facts_of
from snugvl.cli.serve import ChildOptions
from snugvl.cli.serve_plan import Planned, engine_for
from snugvl.cli.serve_show import LoadingProgress
from snugvl.core.options import LoadOptions
from snugvl.core.service import Health
from snugvl.hardware.describe import describe
from snugvl.planner.plan import allocation_of
from snugvl.planner.solve import Candidate, require, solve
from snugvl.planner.wishes import Wishes
from tests.server.fake import FakeService


def planned() -> Planned:
    """Pocket on a described card."""
    place, wishes = describe("rtx-5060"), Wishes(backend="native")
    candidate = Candidate(facts_of("pocket", offline=True))
    plan = solve([candidate], place, wishes)
    return Planned("pocket", require(plan), plan, place, (candidate,), wishes)


@pytest.mark.parametrize("quiet", [False, True])
def test_what_changed_since_the_plan_is_said_when_it_is_ready(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    service = FakeService()
    assert service.capabilities is not None
    changed = "planned for 7.00 GiB, of which 5.80 GiB are left"
    plan = replace(allocation_of(planned().choice), changed=changed)
    service.capabilities = replace(service.capabilities, plan=plan)
    LoadingProgress(service, quiet=quiet, started=0.0)(Health("ready", ""))
    said = capsys.readouterr().err.splitlines()
    if quiet:
        assert not said
    else:
        assert said[0].endswith(changed)
        assert "ready in" in said[1]


def test_the_engine_is_sent_what_the_plan_chose() -> None:
    """Not the options alone: its process would plan anew, and what was printed would be a guess."""
    found = planned()
    engine = engine_for(found, LoadOptions("pocket"), ChildOptions())
    assert isinstance(engine, SupervisedEngine)
    assert engine._start.choice.planned == allocation_of(found.choice)


@pytest.mark.parametrize(("context", "dtype"), [(4096, "float32"), (32768, "bfloat16")])
def test_transformers_on_a_processor_is_told_the_planned_type(context: int, dtype: str) -> None:
    """It would take float32 wherever half of the memory has room for weights, whatever a context takes."""
    place, model = describe("none", ram="18GiB"), "OpenGVLab/InternVL3-2B-hf"
    wishes = Wishes(context=context, purpose="documents")
    candidate = Candidate(facts_of(model, offline=True))
    plan = solve([candidate], place, wishes)
    choice = require(plan)
    assert (choice.option.engine, choice.settings.context) == ("transformers", context)
    found = Planned(model, choice, plan, place, (candidate,), wishes)
    engine = engine_for(found, LoadOptions(model, device="cpu"), ChildOptions())
    assert isinstance(engine, SupervisedEngine)
    said = engine._start.choice
    assert (said.engine, said.model, said.device) == ("transformers", model, "cpu")
    assert (said.context, said.dtype, said.weights) == (context, dtype, "auto")
    asked = engine_for(found, LoadOptions(model, dtype="float16"), ChildOptions())
    assert isinstance(asked, SupervisedEngine)
    assert asked._start.choice.dtype == "float16"
