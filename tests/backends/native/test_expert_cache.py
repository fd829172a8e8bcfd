"""An engine whose plan has experts in host memory: from files to text, and both memories in its ledger."""

from dataclasses import replace
from pathlib import Path

from PIL import Image

from snugvl.backends.native.loading import LoadedEngine, load_engine
from snugvl.checkpoint.read import facts_of
from snugvl.core.ledger import LedgerRow
from snugvl.core.memory_kinds import Kind
from snugvl.core.options import LoadOptions
from snugvl.model import Model
from snugvl.planner.footprint.total import footprint
from snugvl.planner.footprint.weights import expert_cache_bytes, expert_host_bytes
from snugvl.planner.inventory import inventory
from snugvl.planner.plan import Allocation
from tests import mixtures
from tests.inputs.conftest import small_tokenizer, write_checkpoint


def folder_of(place: Path) -> Path:
    write_checkpoint(place)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    placeholders = tuple(small_tokenizer().token_to_id(name) for name in names)
    pixels = (place / "preprocessor_config.json").read_text()
    mixtures.write(place, mixtures.Options(vocab=512, placeholders=placeholders))
    (place / "preprocessor_config.json").write_text(pixels)
    return place


def answer(loaded: LoadedEngine) -> str:
    """Greedy text about a picture; the engine is closed."""
    with Model(loaded.backend) as model:
        return model.ask(Image.new("RGB", (64, 48), "red"), "What?", max_tokens=24).text


def test_an_engine_runs_a_plan_with_experts_in_host_memory(tmp_path: Path) -> None:
    options = LoadOptions(str(folder_of(tmp_path)), device="cpu", context=512)
    whole = load_engine(options)
    assert whole.beside == ()
    was, model = whole.allocation, inventory(facts_of(options.model))
    settings = was.settings._replace(expert_slots=2)
    planned: Allocation = replace(was, settings=settings, footprint=footprint(model, settings, was.device))
    right, in_all = answer(whole), whole.weights["text weights"]
    assert len(set(right)) > 3
    apart = load_engine(options, planned=planned)
    assert apart.allocation is planned
    held = expert_host_bytes(model, settings)
    assert apart.beside == (LedgerRow("weights in host memory", held, held, kind=Kind.HOST),)
    assert apart.weights["text weights"] == apart.planned["text weights"]
    assert apart.weights["text weights"] == in_all - held + expert_cache_bytes(model, settings)
    assert apart.backend.memory()["weights"] == sum(apart.weights.values())
    assert answer(apart) == right
