"""A pass layer by layer gives what transformers gives at once; nothing depends on how it is cut."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from snugvl.backends.place import TargetDevice
from snugvl.core.config import KVFormat
from snugvl.engine.admission import check_prompt
from snugvl.engine.request import EngineRequest, VisionItem
from snugvl.errors import DoesNotFit
from snugvl.fidelity import memory
from snugvl.fidelity.memory import plan_pass
from snugvl.fidelity.participant import Extent
from snugvl.fidelity.sweep import LEAST_CHUNK, Sequences, Sweep, SweepSizes
from snugvl.hardware.machine import Gpu
from snugvl.models.decoder import Layer
from snugvl.models.layered import LayeredNetwork
from snugvl.models.loader import Storage, open_checkpoint
from tests import hybrid
from tests.checkpoints import IMAGE
from tests.fidelity.conftest import compared, items
from tests.models.forward import Prompt
from tests.models.test_qwen3_vl import prompt

CPU = torch.device("cpu")
PROMPTS = (prompt(1, (1, 4, 6), 2, (1, 8, 2), 3), prompt(4, 5, 6))
ANSWERS = (((9, 8, 7, 6), (9,), (9, 1, 2)), ((3, 5),))
Open = Callable[..., LayeredNetwork]


@pytest.fixture(scope="module", params=["attention", "recurrent"])
def folder(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny if request.param == "attention" else hybrid.write(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def network() -> Iterator[Open]:
    """Opens a folder, layer by layer."""
    with ExitStack() as stack:

        def opened(folder: Path, storage: Storage | None = None, **said: Any) -> LayeredNetwork:
            checkpoint = open_checkpoint(folder, dtype=torch.float32, storage=storage)
            return stack.enter_context(closing(LayeredNetwork(checkpoint, CPU, **said)))

        yield opened


def sequences(network: LayeredNetwork, case: Prompt, answers: tuple[tuple[int, ...], ...]) -> Sequences:
    pictures = case.patches.split([t * h * w for t, h, w in case.grids]) if case.grids else ()
    vision = tuple(
        VisionItem(patches, grid, bytes([number]))
        for number, (patches, grid) in enumerate(zip(pictures, case.grids, strict=True))
    )
    request = EngineRequest("", tuple(case.ids), vision=vision)
    return Sequences(check_prompt(request, network.model.config), answers)


@torch.inference_mode()
def swept(network: LayeredNetwork, chunk: int, kv: KVFormat = "bf16") -> list[list[torch.Tensor]]:
    groups = [sequences(network, *each) for each in zip(PROMPTS, ANSWERS, strict=True)]
    return Sweep(network, groups, SweepSizes(chunk, kv, CPU)).run()


def oracle(model: Any, case: Prompt, answer: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([[*case.ids, *answer]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    if case.grids:
        inputs |= {"pixel_values": case.patches, "image_grid_thw": torch.tensor(case.grids)}
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits[0]
    return logits[len(case.ids) - 1 : -1]


@pytest.mark.parametrize("chunk", [512, 5])
@pytest.mark.sample("attention-5", "recurrent-512")
def test_every_answer_is_judged_as_transformers_does(
    chunk: int, folder: Path, theirs: Any, network: Open
) -> None:
    ours = network(folder)
    head = ours.head_rows(0, ours.vocab_size)
    for case, answers, found in zip(PROMPTS, ANSWERS, swept(ours, chunk), strict=True):
        for answer, states in zip(answers, found, strict=True):
            wanted = oracle(theirs, case, answer)
            assert wanted.abs().max() > 0.5
            torch.testing.assert_close(states @ head.T, wanted, atol=2e-4, rtol=0)


def test_files_are_read_once_however_many_answers(folder: Path, network: Open) -> None:
    read = 0

    def told(nbytes: int) -> None:
        nonlocal read
        read += nbytes

    ours = network(folder, told=told)
    decoder, tower = ours.model.decoder, ours.model.tower
    assert tower is not None
    swept(ours, 512)
    assert read == ours.stored_bytes(decoder.layers, decoder.norm, tower) > 0
    assert all(tensor.is_meta for tensor in ours.model.parameters())  # and nothing stays in memory


def test_a_chunk_without_memory_is_computed_in_halves(
    folder: Path, network: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snugvl.fidelity.sweep.LEAST_CHUNK", 2)
    whole, forward, refused = swept(network(folder), 512), Layer.forward, 0

    def short(layer: Layer, x: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal refused
        if len(x) <= 4:
            return forward(layer, x, *args)
        forward(layer, x, *args)  # the cache, and what it was given, are spoilt already
        x.fill_(torch.nan)
        refused += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Layer, "forward", short)
    for wanted, found in zip(whole, swept(network(folder), 512), strict=True):
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, b, atol=2e-4, rtol=0)
    assert refused > 0


def test_memory_that_is_short_for_few_tokens_is_an_error(
    network: Open, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def short(_layer: Layer, x: torch.Tensor, *_args: Any) -> torch.Tensor:
        asked.append(len(x))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Layer, "forward", short)
    with pytest.raises(torch.OutOfMemoryError):
        swept(network(tiny), 512)
    assert min(asked) <= LEAST_CHUNK


GPU = Gpu(index=0, name="a GPU", total_bytes=8 << 30, free_bytes=8 << 30, compute_capability=(8, 9))


def test_the_plan_takes_what_there_is(tiny_whole: Path) -> None:
    """With less memory hidden states wait in host memory, then questions are divided, then refused."""
    comparison, _ = compared(tiny_whole, items(1), weights=["bf16"])
    side = comparison.reference
    load = memory.QuestionMemory(Extent(9000, 8900, 35600), 2, 200)
    with closing(side.network(CPU, lambda _read: None)) as network:

        def plan(device_mib: int, host_mib: int = 4096) -> memory.PassPlan:
            place = TargetDevice(torch.device("cuda"), "a GPU", device_mib << 20, (8, 9), gpu=GPU)
            place = replace(place, limit_bytes=device_mib << 20, host_bytes=host_mib << 20)
            return plan_pass(side, network, [load] * 40, place)

        roomy = plan(2000)
        assert (roomy.sizes.chunk, roomy.sizes.home.type, len(roomy.batches)) == (2048, "cuda", 1)
        least = roomy.footprint.total_bytes - roomy.footprint.named("hidden states") >> 20
        beside = plan(least + 130)
        assert (beside.sizes.home.type, len(beside.batches)) == ("cpu", 1)
        assert beside.footprint.total_bytes <= beside.usable_bytes
        assert beside.host_bytes > roomy.host_bytes
        parts = plan(least + 130, host_mib=beside.host_bytes >> 19)
        assert [number for batch in parts.batches for number in batch] == list(range(40))
        assert len(parts.batches) > 1
        with pytest.raises(DoesNotFit, match=r"needs .* at once, the largest part being"):
            plan(200)
