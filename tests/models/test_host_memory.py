"""An embedding apart from the rest: loaded into its own memory, read from there, given back."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import snugvl
from snugvl.backends.native import loading
from snugvl.checkpoint.facts import ModelFacts
from snugvl.checkpoint.read import facts_of
from snugvl.errors import DoesNotFit
from snugvl.models import host_memory
from snugvl.models.host_memory import NoPageLockedMemory, page_locked
from snugvl.models.loader import Storage, load_model, tensor_bytes
from snugvl.planner.footprint.weights import part_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.settings import Settings
from tests.text_checkpoints import LLAMA, Text, write

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory is a GPU's")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose lm_head is a tensor of its own, and wide enough for int8."""
    return write(tmp_path / "llama", Text(LLAMA, "llama", {"hidden_size": 128}))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was asked for of page-locked memory, which is plain here."""
    found: list[torch.Tensor] = []

    def plain(nbytes: int, _device: torch.device) -> torch.Tensor:
        found.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        return found[-1]

    monkeypatch.setattr(host_memory, "page_locked", plain)
    return found


@pytest.mark.parametrize("head", ["bf16", "int8"])
def test_it_is_loaded_there_and_gives_the_same_rows(
    folder: Path, taken: list[torch.Tensor], head: Any
) -> None:
    whole = load_model(folder, dtype=torch.bfloat16, device=CPU, storage=Storage(head=head))
    apart = load_model(folder, dtype=torch.bfloat16, device=CPU, storage=Storage(head=head, embedding="cpu"))
    (room,) = taken
    rows = apart.decoder.embed_tokens
    assert rows.weight.untyped_storage().data_ptr() == room.data_ptr()
    ids = torch.arange(rows.rows)
    expected = whole.decoder.embed_tokens.lookup(ids, torch.bfloat16)
    assert torch.equal(rows.lookup(ids, torch.bfloat16), expected)
    planned = part_bytes(inventory(_facts(folder)), Settings("native", head=head), "embedding")
    assert planned <= len(room) < planned + 512
    assert tensor_bytes(rows) == len(room)


def test_memory_that_the_system_does_not_give_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int, _device: torch.device) -> torch.Tensor:
        raise NoPageLockedMemory(nbytes)

    monkeypatch.setattr(host_memory, "page_locked", none)
    with pytest.raises(NoPageLockedMemory):
        load_model(folder, dtype=torch.bfloat16, device=CPU, storage=Storage(embedding="cpu"))
    monkeypatch.setattr(loading, "storage_of", lambda *_: Storage(embedding="cpu"))
    with pytest.raises(DoesNotFit, match=r'page-locked host memory.*: embedding="gpu"'):
        snugvl.load(folder, device="cpu")


def test_a_plan_is_stored_as_it_says() -> None:
    assert loading.storage_of(Settings("native", "int4", "int8", embedding="cpu")).embedding == "cpu"
    assert loading.storage_of(Settings("native", "int4", "int8")).embedding == "gpu"


@needs_gpu
class TestOnAGpu:
    """What only a GPU can show."""

    device = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def _clean(self) -> Iterator[None]:
        yield
        torch.cuda.synchronize()

    @pytest.mark.parametrize("head", ["bf16", "int8"])
    def test_a_gpu_reads_it_also_from_a_graph(self, folder: Path, head: Any) -> None:
        networks = [
            load_model(
                folder,
                dtype=torch.bfloat16,
                device=self.device,
                storage=Storage(head=head, embedding=place),
            )
            for place in ("gpu", "cpu")
        ]
        on_gpu, apart = (network.decoder.embed_tokens for network in networks)
        assert apart.weight.device.type == "cpu"
        assert apart.weight.is_pinned()
        ids = torch.randperm(apart.rows, device=self.device)
        expected = on_gpu.lookup(ids, torch.bfloat16)
        assert torch.equal(apart.lookup(ids, torch.bfloat16), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = apart.lookup(ids, torch.bfloat16)
        ids.copy_(ids.flip(0))
        graph.replay()
        assert torch.equal(found, expected.flip(0))

    def test_it_takes_nothing_of_the_gpu_and_goes_with_its_last_tensor(self) -> None:
        size = 256 << 20
        before = torch.cuda.mem_get_info()[0]
        room = page_locked(size, self.device)
        assert (len(room), room.is_pinned()) == (size, True)
        assert before - torch.cuda.mem_get_info()[0] < 8 << 20
        row, address = room[-64:], room.data_ptr()
        del room
        gc.collect()
        row.fill_(7)
        del row
        gc.collect()
        again = page_locked(size, self.device)  # would be another place if the first were still there
        assert again.data_ptr() == address or torch.cuda.mem_get_info()[0] <= before

    def test_too_much_is_refused_and_nothing_is_broken(self) -> None:
        with pytest.raises(NoPageLockedMemory):
            page_locked(1 << 50, self.device)
        assert torch.ones(8, device=self.device).sum().item() == 8


def _facts(folder: Path) -> ModelFacts:
    return facts_of(str(folder), offline=True)
