"""One tiny Qwen3-VL for all engines; each engine started once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from snugvl.inputs.tokenizer import Tokenizer
from tests import checkpoints
from tests.backends.contract.engines import CHOSEN, IN_PROCESS, Running
from tests.inputs.conftest import whole_options, write_checkpoint

POCKET = Path(__file__).parents[3] / "src/snugvl/pocket"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with heads as wide as vLLM's CPU kernels need, and a template that shows tools."""
    folder = write_checkpoint(tmp_path_factory.mktemp("contract"))
    (folder / "chat_template.jinja").write_bytes((POCKET / "chat_template.jinja").read_bytes())
    rope = checkpoints.TEXT["rope_scaling"] | {"mrope_section": [8, 4, 4]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "TEXT", checkpoints.TEXT | {"head_dim": 32, "rope_scaling": rope})
        return checkpoints.write(folder, whole_options(folder))


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Iterator[Running]:
    """Our own engine, which the others are held to."""
    made = Running("native", IN_PROCESS["native"](checkpoint))
    yield made
    made.close()


@pytest.fixture(scope="session", params=list(CHOSEN))
def running(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Running]:
    """Each engine in turn."""
    if request.param == "native":
        yield request.getfixturevalue("reference")
        return
    made = Running(request.param, CHOSEN[request.param](checkpoint))
    yield made
    made.close()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)
