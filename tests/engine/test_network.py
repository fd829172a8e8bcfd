"""The engine on the real network, fp32: in company, in chunks and preempted as alone and whole."""

from pathlib import Path

import pytest
import torch

from snugvl.core.config import EngineConfig, KVFormat
from snugvl.core.sampling import SamplingParams
from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest, VisionItem
from snugvl.errors import RequestError
from snugvl.models.loader import load_model
from tests.checkpoints import END, IMAGE, START
from tests.engine.toy import run, tokens


def requests() -> list[EngineRequest]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for name, sides in enumerate([(), ((4, 6),), ((2, 4), (8, 4), (6, 6))]):
        ids, items = list(range(10, 17 + name)), []
        for h, w in sides:
            patches = torch.randn(h * w, 3 * 2 * 16 * 16, generator=generator)
            items.append(VisionItem(patches, (1, h, w), f"{name}{h}{w}".encode()))
            ids += [START, *[IMAGE] * (h * w // 4), END, 20 + h]
        made.append(
            EngineRequest(str(name), tuple(ids), SamplingParams(max_tokens=24, logprobs=1), tuple(items))
        )
    return made


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_company_chunks_and_preemption_change_no_token(tiny_untied: Path, kv_cache: KVFormat) -> None:
    """In FP8, too: a whole prompt attends to the rounded keys that its chunks would find in the cache."""
    model = load_model(tiny_untied, dtype=torch.float32, device=torch.device("cpu"))
    whole = EngineConfig(num_blocks=64, max_model_len=256, kv_cache=kv_cache)
    alone = [run(Engine(model, whole), item)[item.request_id] for item in requests()]
    assert len({tuple(tokens(answer)) for answer in alone}) == 3
    tight = EngineConfig(
        num_blocks=12, block_size=8, max_model_len=96, max_num_seqs=4, max_batched_tokens=7, kv_cache=kv_cache
    )
    here = Engine(model, tight)
    together = run(here, *requests())
    for item, right in zip(requests(), alone, strict=True):
        mine = together[item.request_id]
        assert tokens(mine) == tokens(right)
        assert [o.logprob for o in mine] == pytest.approx([o.logprob for o in right], abs=1e-4)
    assert here.stats.preemptions > 0


def test_choices_and_cached_prefixes_in_fp8(tiny_untied: Path) -> None:
    """Blocks of bytes are copied and found again like any others; the pool is a quarter of float32's."""
    model = load_model(tiny_untied, dtype=torch.float32, device=torch.device("cpu"))
    narrow, wide = (
        Engine(model, EngineConfig(num_blocks=64, max_model_len=256, kv_cache=kind))
        for kind in ("fp8", "bf16")
    )
    assert narrow.memory()["kv_cache"] * 4 == wide.memory()["kv_cache"]
    prompt = tuple(range(10, 50))
    greedy = EngineRequest("a", prompt, SamplingParams(max_tokens=12, n=2, logprobs=1))
    first = run(narrow, greedy)["a"]
    assert tokens(first, 0) == tokens(first, 1), "two greedy choices, the second on a copied block"
    again = run(narrow, EngineRequest("b", prompt, SamplingParams(max_tokens=12, logprobs=1)))["b"]
    assert narrow.stats.prefix_hit_tokens >= 32
    assert tokens(again) == tokens(first, 0)
    exact = run(wide, EngineRequest("b", prompt, SamplingParams(max_tokens=12, logprobs=1)))["b"]
    ours, right = again[0].logprob, exact[0].logprob
    assert ours is not None
    assert ours != pytest.approx(right, abs=1e-6), "nothing was rounded"
    assert ours == pytest.approx(right, abs=0.2)


def test_an_unknown_format_of_the_cache_is_refused() -> None:
    with pytest.raises(RequestError, match="kv_cache 'int8' is unknown; use bf16, fp8") as caught:
        EngineConfig(num_blocks=8, kv_cache="int8")  # type: ignore[arg-type]
    assert caught.value.field == "kv_cache"
