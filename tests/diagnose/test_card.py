"""What is known of the GPU decides where the log says nothing of it."""

# ruff: noqa: E501 - lines of a log

from snugvl.diagnose.explain import explain
from snugvl.diagnose.facts import Card

TENSOR_PARALLEL = """\
vllm serve Qwen/Qwen3-VL-8B-Instruct-FP8 --max-model-len 4096 --gpu-memory-utilization 0.76 --kv-cache-dtype fp8 --mm-processor-kwargs '{"max_pixels":1376256}' --tensor-parallel-size 2
(APIServer pid=1) INFO 11-21 22:30:01 [utils.py:299] vLLM API server version 0.22.1
(Worker_TP0 pid=3) INFO 11-21 22:30:31 [gpu_model_runner.py:4700] Model loading took 5.29 GiB memory and 9.1 seconds
(Worker_TP0 pid=3) INFO 11-21 22:30:41 [gpu_worker.py:450] Available KV cache memory: -0.25 GiB
(EngineCore pid=2) ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`
"""


def test_what_the_launcher_knows_of_the_card_decides() -> None:
    """The log of a vLLM that was told what share to take doesn't say of how much: it reads like too small a share."""
    alone = explain(TENSOR_PARALLEL)
    assert [cause.kind for cause in alone.causes] == ["utilisation_low"]
    told = explain(TENSOR_PARALLEL, Card(8151 << 20, 7200 << 20))
    kinds = [cause.kind for cause in told.causes]
    assert kinds == ["weights"]
    assert "5.29 GiB of a ceiling of 6.05 GiB" in told.causes[0].explanation
    less = explain(TENSOR_PARALLEL.replace("5.29", "3.80"), Card(8151 << 20, 7200 << 20))
    assert [cause.kind for cause in less.causes] == ["context"]
    assert (
        "3.80 GiB for weights and 2.50 GiB for activations and libraries, 0.25 GiB too much"
        in less.causes[0].explanation
    )
    # A log that does say it is believed.
    said = (
        TENSOR_PARALLEL
        + "ValueError: Free memory on device cuda:0 (6.04/139.80 GiB) on startup is less than desired GPU memory utilization (0.76, 106.2 GiB)"
    )
    assert explain(said, Card(8151 << 20, 7200 << 20)).causes[0].kind == "utilisation_over_free"
