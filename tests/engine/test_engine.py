"""The engine's promises: how requests end, what is refused, what an error leaves behind."""

import time
from dataclasses import replace

import pytest
import torch

from snugvl.engine.engine import Engine
from snugvl.engine.request import EngineRequest
from snugvl.errors import DeadlineExceeded, EngineError, QueueFull, RequestError
from tests.engine.toy import BOMB, POISON, Toy, engine, picture, request, run, tokens


@pytest.fixture
def here() -> Engine:
    return engine()


def test_an_idle_engine_does_nothing(here: Engine) -> None:
    assert not here.has_work
    assert here.step() == []
    here.check_integrity()


def test_stop_ids_end_with_stop_and_are_reported(here: Engine) -> None:
    free = tokens(run(here, request("a", 1, 2, 3, max_tokens=20))["a"])
    stop = free[4]
    outputs = run(here, request("a", 1, 2, 3, max_tokens=20, stops=[stop]))["a"]
    assert tokens(outputs) == free[: free.index(stop) + 1]
    assert outputs[-1].finish == "stop"
    outputs = run(here, request("a", 1, 2, 3, max_tokens=20, stop_token_ids=(stop,)))["a"]
    assert tokens(outputs) == free[: free.index(stop) + 1]


def test_ignore_eos_goes_on_past_the_models_stops_but_not_past_the_users(here: Engine) -> None:
    free = tokens(run(here, request("a", 1, 2, 3, max_tokens=20))["a"])
    ignoring = {"max_tokens": 20, "ignore_eos": True, "stops": [free[4]]}
    assert tokens(run(here, request("a", 1, 2, 3, **ignoring))["a"]) == free
    ended = run(here, request("a", 1, 2, 3, **ignoring, stop_token_ids=(free[4],)))["a"]
    assert ended[-1].finish == "stop"


def test_a_stop_on_the_last_allowed_token_is_a_stop(here: Engine) -> None:
    free = tokens(run(here, request("a", 1, 2, 3, max_tokens=1))["a"])
    assert run(here, request("a", 1, 2, 3, max_tokens=1, stops=free))["a"][-1].finish == "stop"


def test_without_max_tokens_the_context_is_the_end() -> None:
    outputs = run(engine(max_model_len=20), request("a", 1, 2, 3, max_tokens=None))["a"]
    assert len(outputs) == 17
    assert outputs[-1].finish == "length"


def test_penalties_count_what_was_generated(here: Engine) -> None:
    """Against one request a token, whose bias says what the penalties should."""
    ids, bias = (1, 2, 3), dict.fromkeys(range(6), 4.0)  # a preference, or nothing would repeat
    params = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": bias}
    got = tokens(run(here, request("a", *ids, max_tokens=16, **params))["a"])
    assert len(set(got)) < len(got)
    want: list[int] = []
    for _ in range(16):
        now = {t: bias.get(t, 0.0) - 0.4 * want.count(t) - 0.3 * (t in want) for t in range(42)}
        want += tokens(run(here, request("b", *ids, *want, max_tokens=1, logit_bias=now))["b"])
    assert got == want
    assert got != tokens(run(here, request("a", *ids, max_tokens=16, logit_bias=bias))["a"])


def test_logprobs_only_where_asked(here: Engine) -> None:
    outputs = run(here, request("a", 1, logprobs=3), request("b", 1, logprobs=0), request("c", 1))
    assert all(
        len(o.top_logprobs) == 3 and o.top_logprobs[0] == (o.token_id, o.logprob) for o in outputs["a"]
    )
    assert all(o.top_logprobs == () for o in outputs["b"])
    assert [o.logprob for o in outputs["b"]] == pytest.approx([o.logprob for o in outputs["a"]])
    assert all(o.logprob is None for o in outputs["c"])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_at_any_moment_frees_everything(here: Engine, steps: int) -> None:
    here = engine(max_batched_tokens=8)
    here.add(request("a", *range(10), picture(1), n=2))
    for _ in range(steps):
        here.step()
    ended = here.abort("a")
    assert [(o.choice, o.token_id, o.finish) for o in ended] == [(0, None, "abort"), (1, None, "abort")]
    assert here.abort("a") == here.abort("never seen") == []
    assert not here.has_work
    assert here.step() == []
    here.check_integrity()
    assert here.stats.free_blocks == 64


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("choice", [0, 1, 2])
def test_abort_of_one_choice_leaves_the_others(choice: int, steps: int) -> None:
    whole = run(engine(), request("a", *range(10), n=3, temperature=1.0, seed=1))["a"]
    here = engine(max_batched_tokens=8)
    here.add(request("a", *range(10), n=3, temperature=1.0, seed=1))
    before = [output for _ in range(steps) for output in here.step()]
    assert [o.choice for o in here.abort("a", choice)] == [choice]
    after = [*before, *run(here)["a"]]
    for other in {0, 1, 2} - {choice}:
        assert tokens(after, other) == tokens(whole, other)


def test_an_id_can_be_used_again_once_its_request_is_over(here: Engine) -> None:
    here.add(request("a", 1))
    with pytest.raises(RequestError, match="request 'a' is already running") as caught:
        here.add(request("a", 2))
    assert caught.value.field == "request_id"
    here.abort("a")
    assert run(here, request("a", 2))["a"]


def test_the_queue_is_bounded() -> None:
    here = engine(max_waiting=2)
    here.add(request("a", 1))
    here.add(request("b", 1))
    with pytest.raises(QueueFull, match=r"^2 requests are waiting already; try again later$"):
        here.add(request("c", 1))
    here.step()
    assert set(run(here, request("c", 1))) == {"a", "b", "c"}


def test_preempted_requests_take_no_place_in_the_queue() -> None:
    here = engine(num_blocks=6, max_model_len=24, max_waiting=2, max_batched_tokens=8)
    for first, name in enumerate("ab"):
        here.add(request(name, first, 2, 3, 4, max_tokens=16))
    while not here.stats.preemptions:
        here.step()
    assert here.stats.waiting == 1
    run(here, request("c", 1), request("d", 1))


def test_a_passed_deadline_ends_the_request_and_frees_its_blocks(here: Engine) -> None:
    here.add(request("late", 1, 2, 3, deadline=time.monotonic(), n=2))
    assert [o.choice for o in here.step() if isinstance(o.error, DeadlineExceeded)] == [0, 1]
    slow = request("slow", 1, 2, 3, max_tokens=100, deadline=time.monotonic() + 3600)
    here.add(slow)
    here.add(request("other", 4, 5, 6))
    first = here.step()
    (live,) = here._requests["slow"]
    live.request = replace(slow, deadline=time.monotonic() - 0.1)
    here._requests.deadline = 0.0
    ended = here.step()
    assert {o.request_id for o in first} == {"slow", "other"}
    error = next(o.error for o in ended if o.request_id == "slow")
    assert isinstance(error, DeadlineExceeded)
    assert str(error).endswith("s ago, with 1 tokens generated")
    assert len(tokens([*first, *ended, *run(here)["other"]])) == 8 + 1


def test_an_exception_in_the_network_ends_what_runs_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = tokens(run(engine(), request("x", 1, 2))["x"])
    here = engine(max_num_seqs=2, max_batched_tokens=8)
    here.add(request("a", 1, 2, 3))
    here.step()
    here.add(request("bomb", 5, BOMB))
    here.add(request("waiting", 1, 2))
    outputs = here.step()
    assert [(o.request_id, o.token_id, o.finish) for o in outputs] == [
        ("a", None, "error"),
        ("bomb", None, "error"),
    ]
    for output in outputs:
        assert isinstance(output.error, EngineError)
        assert str(output.error) == "the engine failed: RuntimeError: the bomb went off"
        assert output.error.__cause__ is output.error.__context__ is output.error.__traceback__ is None
    assert "the bomb went off" in caplog.text, "the traceback is in the log"
    here.check_integrity()
    assert here.stats.free_blocks == 64
    assert here.stats.faults == 1
    assert tokens(run(here)["waiting"]) == right, "what waited is not lost"
    assert tokens(run(here, request("next", 1, 2))["next"]) == right


def test_a_fault_while_encoding_and_one_while_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy()
    here = engine(model)
    for target, name in ((model, "encode_vision"), (here._scheduler, "fork"), (here._scheduler, "schedule")):
        with monkeypatch.context() as patch:

            def explode(*_: object) -> None:
                raise MemoryError("no more")

            patch.setattr(target, name, explode, raising=True)
            outputs = run(here, request("a", 1, picture(1), n=2))["a"]
        assert [o.finish for o in outputs] == ["error", "error"]
        assert here.stats.free_blocks == 64
    assert run(here, request("a", 1, picture(1)))["a"][-1].finish == "length"


def test_logits_that_are_not_numbers_end_their_request_only() -> None:
    right = tokens(run(engine(), request("x", 1, 2, 3, 4, 5))["x"])
    for slots in (2, 8):
        here = engine(max_num_seqs=slots)
        outputs = run(here, request("poison", POISON, 2, n=2), request("x", 1, 2, 3, 4, 5))
        assert [o.finish for o in outputs["poison"]] == ["error", "error"]
        assert isinstance(outputs["poison"][0].error, EngineError)
        assert "logits are not finite after 2 tokens" in str(outputs["poison"][0].error)
        assert tokens(outputs["x"]) == right
        assert tokens(run(here, request("y", 1, 2, 3, 4, 5))["y"]) == right, "its blocks poison nobody"


def test_a_poisoned_prompt_leaves_nothing_in_its_blocks() -> None:
    """NaN stays in freed blocks: the next owner's unwritten slots, and those that padding points to."""
    right = tokens(run(engine(), request("x", 7, max_tokens=12))["x"])
    here = engine(num_blocks=12, max_model_len=48, max_batched_tokens=8)
    here.add(request("poison", POISON, *range(40), *range(5), max_tokens=2))
    for _ in range(5):
        here.step()
    here.abort("poison")
    assert here._cache.storage[1, :, :40].isnan().any(dim=-1).all(), "NaN in every block but two"
    outputs = run(here, request("x", 7, max_tokens=12), request("long", *range(20), max_tokens=12))
    assert tokens(outputs["x"]) == right


def test_reset_by_hand(here: Engine) -> None:
    here.add(request("a", 1, picture(1)))
    here.step()
    assert [str(o.error) for o in here.reset()] == ["the engine was reset while this request was running"]
    here.check_integrity()
    assert not here.has_work


def test_memory_names_every_component() -> None:
    model = Toy()
    here = engine(model, max_batched_tokens=8)
    idle = here.memory()
    weights = sum(p.nbytes for p in model.parameters())
    # layers · (keys, values) · slots · kv heads · head size · bytes
    assert idle == {
        "weights": weights,
        "kv_cache": 2 * 2 * 256 * 1 * 8 * 8,
        "recurrent_state": 0,
        "encoder_outputs": 0,
        "vision_inputs": 0,
    }
    item = picture(1, 8, 8)
    here.add(request("a", 1, item))
    here.step()
    assert here.memory()["vision_inputs"] == item.patches.nbytes
    assert here.memory()["encoder_outputs"] == 16 * 2 * 16 * 8, "held while a chunk boundary cuts the image"
    run(here)
    assert here.memory() == idle


def test_stats_count(here: Engine) -> None:
    here.add(request("a", 1, 2, 3, n=2, max_tokens=4))
    here.add(request("b", 4, picture(1), max_tokens=4))
    assert (here.stats.waiting, here.stats.running) == (2, 0)
    here.step()
    assert (here.stats.waiting, here.stats.running) == (0, 3)
    run(here)
    stats = here.stats
    assert (here.steps, stats.generated_tokens, stats.items_encoded) == (4, 12, 1)
    assert stats.prompt_tokens == 3 + 9 + 3 * 3


def test_nothing_tracks_gradients(here: Engine) -> None:
    run(here, EngineRequest("a", (1, 2)))
    assert not here._cache.storage.requires_grad
    assert not torch.is_inference_mode_enabled()
