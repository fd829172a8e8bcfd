"""`snugvl.load`: from a model's name to a running engine, ours, transformers' or llama.cpp's."""

from pathlib import Path
from typing import Literal, cast

from snugvl.checkpoint.families import read_config
from snugvl.checkpoint.gguf_files import gguf_files
from snugvl.checkpoint.locate import locate
from snugvl.core.folders import check_current_folder, give_home
from snugvl.core.formats import WeightsName
from snugvl.core.guesses import arguments_hinted
from snugvl.core.kernel_checks import KernelCheck
from snugvl.core.options import (
    BackendName,
    DtypeName,
    EmbeddingName,
    ExpertsName,
    KVCacheName,
    LoadOptions,
    Progress,
    PurposeName,
    SpeculationName,
    ThinkingName,
    TowerName,
    in_python,
)
from snugvl.errors import RequestError, SnugvlError, UnsupportedModel, WrongType
from snugvl.model import Model
from snugvl.planner.engines import refuse_lacking, rules_of


@arguments_hinted
def load(
    model: str | Path = "pocket",
    *,
    device: str = "auto",
    dtype: DtypeName = "auto",
    weights: WeightsName = "auto",
    kv_cache: KVCacheName = "auto",
    context: int | None = None,
    max_pixels: int | None = None,
    memory: int | str | None = None,
    backend: BackendName = "native",
    language_only: bool = False,
    prefix_cache: bool = True,
    tower: TowerName = "auto",
    embedding: EmbeddingName = "auto",
    experts: ExpertsName = "auto",
    thinking: ThinkingName = "auto",
    step_graphs: bool | None = None,
    speculation: SpeculationName = "auto",
    trust_remote_code: bool = False,
    purpose: PurposeName = "chat",
    images: int | None = None,
    concurrency: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a checkpoint into our own engine, or into Hugging Face transformers, in this process.

    Args:
        model: `pocket`, a checkpoint folder, or a Hub id that is in the local cache.
        device: `cpu`, `cuda`, `cuda:1`, …; auto takes the GPU if there is one.
        dtype: activations, KV cache (unless it is FP8), and weights that stay as wide; auto takes bfloat16
            (float16 before Ampere) on a GPU, and on a CPU float32 where it leaves half of the free memory.
        weights: format of the decoder's weights in memory. Auto keeps a checkpoint that is stored in 4 bits,
            and on a GPU an FP8 one, as it is; of others it takes bf16, int8, int6, int5 or int4, the first
            that fits, with embedding and lm_head in int8 where that makes room. On a CPU it takes `dtype`.
        kv_cache: format of keys and values: bf16 stands for that of the activations; fp8 takes about half as
            much (q8_0 in llama.cpp; transformers has none, and our own engine none for models that don't
            normalise their keys). Auto takes fp8 on a GPU, where it makes room for larger images or a longer
            context.
        context: tokens of one conversation, image tokens included; by default as many as fit, up to 8,192.
        max_pixels: scale larger images down to this many pixels (the checkpoint's own limit at most), and
            the frames of a video until all together have as many tokens; by default what half of the
            context holds.
        memory: most that may be taken, in bytes or as a size such as "7200MiB", a GPU's CUDA context
            included; by default what is free, less a margin. On a GPU torch is held to it.
        backend: auto takes our own engine where it runs the model, llama.cpp for a GGUF file (in a process of
            its own; "native" also reads many of them), else transformers.
        language_only: leave the vision tower out; pictures are refused, and its memory is free.
        prefix_cache: start a prompt from what earlier ones with the same beginning have left. The time to the
            first token then reveals whether a prompt like it came before. Transformers never does it.
        tower: where the vision tower's weights are: "resident" on the GPU, or "streamed" (our own engine
            alone): in host memory, and block by block on the GPU while it encodes a picture. Auto streams
            them where nothing else fits as well.
        embedding: where the embedding is: on the "gpu", or "cpu" (our own engine alone): in page-locked main
            memory, where the GPU reads a row for each token. Auto has it there where that makes room, for
            models whose embedding isn't lm_head as well; under WSL2 never.
        experts: where a mixture's experts are: on the "gpu", or "cpu" (our own engine alone): in host memory,
            with a cache of them on the GPU that is as large as fits. It has not been measured on a GPU yet,
            so auto is "gpu".
        thinking: whether the model thinks before it answers, where a request doesn't say ("on", "off"); auto
            leaves it to the chat template, but for pictures where the vendor's scores speak against it.
        step_graphs: on a GPU with plenty of free memory, replay steps with prompts, and small pictures, from
            CUDA graphs (our own engine alone): the first token comes sooner on a fast GPU.
        speculation: draft tokens from prompt and answer ("ngram"), or by the multi-token predictor that the
            checkpoint carries ("mtp": Qwen3.5), and compute several in a step (our own engine alone). The
            answers are the same. Auto has the predictor draft where there is one, a GPU has room for it, and
            it is seen to pay.
        trust_remote_code: run Python files that the checkpoint brings (transformers only).
        purpose: what the memory is planned for: chat, documents, detect or batch (`snugvl plan --for`).
        images: images of one request that are planned for, and that it may have at most; by default one is
            planned for, and a request may have what its context holds.
        concurrency: requests at the same time that are sure of their whole context.
        progress: called with what is being done and how much is done, from 0 to 1.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedModel: about the checkpoint.
        DoesNotFit: the weights and one conversation need more memory than is free, with the numbers.
        RequestError: an argument is wrong.
    """
    if not isinstance(model, str | Path):
        raise WrongType(
            f"no model was named: {model!r} is neither a name nor a folder; snugvl.load() alone loads pocket",
            field="model",
        )
    options = LoadOptions(
        str(model), device=device, dtype=dtype, weights=weights, kv_cache=kv_cache, context=context,
        max_pixels=max_pixels, memory=memory, backend=backend, language_only=language_only,
        prefix_cache=prefix_cache, tower=tower, embedding=embedding, experts=experts, thinking=thinking,
        step_graphs=step_graphs, speculation=speculation, trust_remote_code=trust_remote_code,
        purpose=purpose, images=images, concurrency=concurrency,
    )  # fmt: skip
    try:
        return load_with(options, progress)
    except SnugvlError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise


def load_with(options: LoadOptions, progress: Progress | None = None) -> Model:
    """Load a model by options that are one value: see `load`."""
    check_current_folder()
    give_home()
    backend = backend_for(options)
    refuse_lacking(backend, options.said(), in_process=True)
    if backend == "llamacpp":
        from snugvl.backends.llamacpp.loading import load_planned as load_llamacpp

        return Model(load_llamacpp(options, progress=progress))
    if backend == "native":
        from snugvl.backends.native.loading import load_engine

        return Model(load_engine(options, progress=progress).backend)
    from snugvl.backends.transformers.loading import load_planned

    return Model(load_planned(options, progress=progress).backend)


def backend_for(options: LoadOptions) -> Literal["native", "transformers", "llamacpp"]:
    """The backend that runs a model in this process.

    Raises:
        RequestError: there is no such backend in this process.
        CheckpointNotFound, CheckpointError: about the checkpoint, where it decides.
    """
    gguf = gguf_files(options.model) is not None
    if gguf and options.backend in ("auto", "llamacpp"):
        return "llamacpp"
    if gguf and options.backend == "native":
        return "native"
    if gguf or options.backend == "llamacpp":
        raise RequestError(
            f"backend {options.backend!r} reads no GGUF file; use auto, native or llamacpp"
            if gguf
            else f"backend 'llamacpp' reads GGUF files alone, not {options.model}; leave it out",
            field="backend",
        )
    if options.backend != "auto":
        if not (rules := rules_of(options.backend)).in_process:
            only = "runs behind `snugvl serve` alone" if rules.starts else "is planned for, and not started"
            raise RequestError(
                f"backend {options.backend!r} {only}; use auto, native or transformers", field="backend"
            )
        return cast(Literal["native", "transformers"], options.backend)
    try:
        read_config(locate(options.model))
    except UnsupportedModel:
        return "transformers"
    return "native"


def check_kernels(model: str, progress: Progress) -> KernelCheck:
    """Look at every kernel that a model would use here, beside plain torch, and keep what is found.

    Raises:
        SnugvlError: there is no GPU, or the model can't be loaded here.
    """
    from snugvl.backends.native.checking import check_model  # needs torch

    return check_model(LoadOptions(model), progress)
