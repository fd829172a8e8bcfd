"""Plans that once were wrong, as the solver makes them now; `PYTHONPATH=OLD/src` shows another version's.

    python benchmarks/right_plans.py

Each line is a machine that is described, a model (or the whole catalogue), what was wished, and the plan. The
last line is the time that a plan over the whole catalogue takes, processor seconds, the best of five.
"""

import time
from typing import Any

from snugvl.checkpoint.read import facts_of
from snugvl.errors import SnugvlError
from snugvl.hardware.describe import describe
from snugvl.planner.plan import Choice, Plan
from snugvl.planner.recommend import catalogue_candidates, with_instead
from snugvl.planner.solve import Candidate, solve
from snugvl.planner.wishes import Wishes

CASES: tuple[tuple[dict[str, Any], str | None, dict[str, Any]], ...] = (
    ({"gpu": "rtx-5060", "held": "500MiB"}, "Qwen/Qwen2.5-VL-3B-Instruct", {}),
    ({"gpu": "rtx-5060", "held": "400MiB"}, "Qwen/Qwen2.5-VL-3B-Instruct", {}),
    ({"gpu": None, "vram": "7GiB"}, "mistralai/Mistral-7B-Instruct-v0.3", {"images": 0}),
    ({"gpu": None, "vram": "8GiB"}, "mistralai/Mistral-7B-Instruct-v0.3", {"images": 0}),
    ({"gpu": None, "vram": "16GiB"}, "Qwen/Qwen3-VL-8B-Instruct", {}),
    ({"gpu": None, "vram": "16GiB"}, None, {}),
    ({"gpu": None, "vram": "17GiB"}, None, {}),
    ({"gpu": "rtx-5060", "os": "wsl2", "held": "951MiB"}, "Qwen/Qwen3-VL-4B-Instruct-FP8", {}),
    ({"gpu": "rtx-5060", "os": "wsl2", "held": "951MiB"}, None, {}),
    ({"gpu": "rtx-4090"}, "google/gemma-3-12b-it", {}),
    ({"gpu": "rtx-4090"}, "google/gemma-3-27b-it", {}),
    ({"gpu": "none", "ram": "8GiB"}, "Qwen/Qwen3-VL-4B-Instruct-FP8", {}),
    ({"gpu": "rtx-3090", "count": 2}, "Qwen/Qwen3-VL-32B-Instruct", {"backend": "vllm"}),
    ({"gpu": "t4", "count": 4}, "Qwen/Qwen3-VL-32B-Instruct-FP8", {"backend": "vllm"}),
    ({"gpu": "rtx-4090"}, "Qwen/Qwen3-8B", {"task": "detect"}),
    ({"gpu": "rtx-4090"}, "Qwen/Qwen3-VL-2B-Instruct-FP8", {"min_image_tokens": 99_999_999}),
    ({"gpu": "v100"}, "Qwen/Qwen3-VL-2B-Instruct-FP8", {}),
    ({"gpu": "rtx-4090"}, None, {"quality": "int4"}),
    ({"gpu": "none", "ram": "32GiB"}, None, {}),
    ({"gpu": "rtx-4090"}, "Qwen/Qwen3-VL-8B-Instruct", {"memory_bytes": 4 << 30}),
)


def told(choice: Choice) -> str:
    """A choice in a line."""
    settings, speed = choice.settings, choice.speed.decode_tokens_per_s
    pixels = f", {choice.tokens:,}-token images" if settings.images else ""
    held = f", {settings.offloaded} layers in main memory" if settings.offloaded else ""
    rate = "no speed" if speed is None else f"{speed:,.1f} tokens/s at most"
    return (
        f"{choice.option.model.name.partition('/')[2]} with {settings.engine}, {settings.weights_name}, "
        f"{settings.kv_name} cache, {settings.context:,} tokens{pixels}{held}; {rate}"
    )


def outcome(plan: Plan) -> str:
    """What a plan comes to."""
    if plan.choice is not None:
        return told(plan.choice)
    other = f"; instead: {told(plan.instead)}" if plan.instead is not None else ""
    reasons = "; ".join(dict.fromkeys(f"{refusal.engine}: {refusal.text}" for refusal in plan.refusals))
    return f"refused ({reasons or 'too large'}){other}"


def main() -> None:
    for card, model, wished in CASES:
        on = {name: value for name, value in card.items() if name not in ("gpu", "count")}
        machine = describe(card["gpu"], count=card.get("count", 1), **on)
        try:
            candidates = (
                catalogue_candidates() if model is None else [Candidate(facts_of(model, offline=True))]
            )
            said = outcome(with_instead(solve(candidates, machine, Wishes(**wished)), machine))
        except SnugvlError as error:
            said = f"refused: {error}"
        where = ", ".join(f"{value}" for value in card.values() if value is not None)
        print(f"{where} | {model or 'the catalogue'} {wished or ''}\n    {said}", flush=True)
    machine, times = describe("rtx-5060", os="wsl2", held="951MiB"), []
    for _ in range(5):
        began = time.process_time()
        solve(catalogue_candidates(), machine, Wishes())
        times.append(time.process_time() - began)
    print(f"a plan over the catalogue: {min(times):.3f} s of processor time, the first {times[0]:.3f} s")


if __name__ == "__main__":
    main()
