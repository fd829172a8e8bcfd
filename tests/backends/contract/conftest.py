"""One tiny Qwen3-VL for all engines; each engine started once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from snugvl.inputs.tokenizer import Tokenizer
from tests.backends.contract.engines import IN_PROCESS, Running

POCKET = Path(__file__).parents[3] / "src/snugvl/pocket"


@pytest.fixture(scope="session")
def checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint of the backends' tests, with a template that shows tools."""
    copy = tmp_path_factory.mktemp("contract")
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    template = copy / "chat_template.jinja"
    template.unlink()
    template.write_bytes((POCKET / "chat_template.jinja").read_bytes())
    return copy


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Iterator[Running]:
    """Our own engine, which the others are held to."""
    made = Running("native", IN_PROCESS["native"](checkpoint))
    yield made
    made.close()


@pytest.fixture(scope="session", params=list(IN_PROCESS))
def running(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Running]:
    """Each engine in turn."""
    if request.param == "native":
        yield request.getfixturevalue("reference")
        return
    made = Running(request.param, IN_PROCESS[request.param](checkpoint))
    yield made
    made.close()


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint)
