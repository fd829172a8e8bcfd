"""Makes a model's facts, which the planner works on, of a configuration and headers."""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snugvl.checkpoint.facts import FactSource, Material, ModelFacts, Role, Stored, TensorFact
from snugvl.checkpoint.families import SUPPORTED, describe, parse_config
from snugvl.checkpoint.families.traits import Expected, Network
from snugvl.checkpoint.gguf_facts import gguf_facts, refuse_missing
from snugvl.checkpoint.gguf_network import ARCHITECTURE
from snugvl.checkpoint.quantized import Packing, bits_of, check_whole, place, read_packing
from snugvl.checkpoint.safetensors import read_tensors
from snugvl.checkpoint.section import Section, read_json
from snugvl.errors import CheckpointError

CONFIG = "config.json"
IMAGES = "preprocessor_config.json"
PROCESSOR = "processor_config.json"


def network_of(config: Mapping[str, Any], images: Mapping[str, Any] | None, where: str) -> Network:
    """The family's view of a configuration.

    Raises:
        CheckpointError, UnsupportedModel: as `families.describe`.
    """
    settings = None if images is None else Section(images, f"{where}: preprocessor_config.json")
    return describe(Section(config, f"{where}: config.json"), settings)


def assemble(name: str, material: Material, network: Network | None = None) -> ModelFacts:
    """The facts of `material`; every tensor that the configuration asks for must be there, and whole.

    `network`: the family's view of the configuration, where the caller has it already.

    Raises:
        CheckpointError: a tensor is missing or of another size than the configuration says.
        UnsupportedModel: an unknown architecture or quantisation.
    """
    if ARCHITECTURE in material.config:
        return gguf_facts(name, material)
    network = network or network_of(material.config, material.images, material.where)
    packing = read_packing(Section(material.config, f"{material.where}: config.json"))
    positions, refusal = _native_positions(material)
    limited = positions is not None and positions < network.text.max_position_embeddings
    tensors, predicts = _classified(network, packing, material)
    return ModelFacts(
        name=name,
        revision=material.revision,
        source=material.source,
        architecture=network.architecture,
        family=network.family,
        text=network.text,
        vision=network.vision,
        tensors=tensors,
        tied=network.tied,
        quantization=packing.kind if packing else None,
        download_bytes=material.download_bytes,
        native=positions is not None,
        native_positions=positions if limited else None,
        native_refusal=refusal,
        own=packing is not None and packing.own,
        predictor=network.predictor if predicts else None,
    )


def _classified(
    network: Network, packing: Packing | None, material: Material
) -> tuple[tuple[TensorFact, ...], bool]:
    """(facts of the stored tensors, whether all tensors that are loaded on request alone are among them)."""
    expected = {tensor.name: tensor for tensor in network.tensors}
    beside = {tensor.name: tensor for tensor in network.unloaded}
    held: dict[str, int] = defaultdict(int)
    facts, eights = [], set()
    for tensor in material.tensors:
        plain = expected.get(tensor.name) if packing is None else None
        if plain is not None:  # most tensors of most models; the whole catalogue is read in one go
            held[plain.name] += math.prod(tensor.shape)
            shape = _as_meant(tensor, plain)
            facts.append(TensorFact(tensor.name, plain.role, tensor.dtype, shape, tensor.nbytes))
            continue
        spot = place(network.canonical(tensor.name))
        known = expected.get(spot.of) or beside.get(spot.of)
        role: Role = known.role if known else "lm_head" if spot.of == "lm_head.weight" else "other"
        if spot.part == "scale":
            role = "scale"
        elif known:
            bits = bits_of(tensor, spot.part, packing, math.prod(known.shape))
            held[known.name] += tensor.nbytes * 8 // bits if bits else math.prod(tensor.shape)
            if bits == 8 and packing is not None and packing.mixed:
                eights.add(tensor.name.rpartition(".")[0])
        loaded = spot.of in expected or role == "lm_head"
        name = known.name if known and packing is None else tensor.name  # older files have other prefixes
        shape = tensor.shape if known is None or spot.part != "plain" else _as_meant(tensor, known)
        facts.append(TensorFact(name, role, tensor.dtype, shape, tensor.nbytes, loaded))
    if eights:
        facts = [
            fact._replace(role="scale8")
            if fact.role == "scale" and fact.name.rpartition(".")[0] in eights
            else fact
            for fact in facts
        ]
    refuse_missing([name for name in expected if name not in held], len(expected), material.where)
    for name, count in held.items():
        shape = (expected.get(name) or beside[name]).shape
        check_whole(name, count, shape, math.prod(shape), material.where)
    return tuple(facts), beside.keys() <= held.keys()


def _as_meant(tensor: Stored, known: Expected) -> tuple[int, ...]:
    """Shape of a tensor, of all experts' matrices as they are multiplied: some files have them turned."""
    turned = known.role == "expert" and sorted(tensor.shape) == sorted(known.shape)
    return known.shape if turned else tensor.shape


def _native_positions(material: Material) -> tuple[int | None, str]:
    """(number of tokens that our own engine runs, "") or, where it refuses the configuration, (None, why).

    The reason is empty where it doesn't run the family.
    """
    try:
        return parse_config(material.config, material.where).text.max_position_embeddings, ""
    except CheckpointError as error:
        named = material.config.get("architectures")
        ours = isinstance(named, list) and bool(named) and named[0] in SUPPORTED
        return None, str(error) if ours else ""


def folder_material(folder: Path, *, source: FactSource = "folder", revision: str | None = None) -> Material:
    """Read configuration and headers of a checkpoint folder.

    Raises:
        CheckpointError: no config.json, no weights, or a file that is truncated or nonsense.
        UnsupportedModel: weights in another format than safetensors.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    config = read_json(folder / CONFIG)
    tensors = tuple(
        Stored(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in read_tensors(folder).values()
    )
    documents = {name: read_json(folder / name) for name in (IMAGES, PROCESSOR) if (folder / name).is_file()}
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Material(str(folder), source, revision, config, image_settings(documents), tensors, size)


def image_settings(documents: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The image processor's settings from the files that exist, or None.

    transformers 5 saves them inside processor_config.json; that file's other fields about images (the tokens
    of one) are kept beside them.
    """
    processor = documents.get(PROCESSOR, {})
    nested = processor.get("image_processor")
    settings = nested if isinstance(nested, dict) else documents.get(IMAGES)
    if settings is None:
        return None
    lengths = {key: processor[key] for key in ("image_seq_len", "image_seq_length") if processor.get(key)}
    return {**settings, **lengths}
