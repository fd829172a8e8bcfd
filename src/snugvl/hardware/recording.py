"""A machine recorded as JSON, to replay it elsewhere: in tests, in a bug report, in a plan for another.

    {"schema": 1, "machine": {…the fields of Machine…, "gpus": [{…Gpu…, "tenants": [{…Tenant…}]}]}}

Fields with a default may be missing; unknown ones are refused, because they may change the meaning.
"""

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from snugvl.errors import InputError
from snugvl.hardware import gpus
from snugvl.hardware.machine import Machine

SCHEMA: Final = 1
MAX_FILE_BYTES: Final = 2**20


def as_json(machine: Machine) -> dict[str, Any]:
    """The fields of `machine` in JSON's types."""
    value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(machine)))
    return value


def record(machine: Machine) -> str:
    """`machine` as JSON text that `replay` reads."""
    return json.dumps({"schema": SCHEMA, "machine": as_json(machine)}, indent=2, ensure_ascii=False) + "\n"


def replay(path: Path) -> Machine:
    """The machine that was recorded in a file.

    Raises:
        InputError: no such file, no recording, of another schema, or with a field that can't be.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than a recording of a machine can be")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not JSON; make a recording with: snugvl doctor --record FILE") from None
    if not isinstance(value, dict) or "machine" not in value:
        raise InputError(
            f"{path} is not a recording of a machine; make one with: snugvl doctor --record FILE"
        )
    if value.get("schema") != SCHEMA:
        raise InputError(
            f"{path} has schema {value.get('schema')!r}, this version reads {SCHEMA}; record it again"
        )
    try:
        machine: Machine = read_value(Machine, value["machine"], "machine")
        _check(machine)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    known = [(gpu, gpus.find(gpu.name, gpu.total_bytes)) for gpu in machine.gpus]
    filled = tuple(  # recordings of before 0.3 don't have it
        dataclasses.replace(gpu, cycles_per_s=gpu.cycles_per_s or (model.cycles_per_s if model else None))
        for gpu, model in known
    )
    return dataclasses.replace(machine, source="recorded", gpus=filled)


def read_value(kind: Any, value: Any, where: str) -> Any:
    """`value` of a JSON document as `kind`, all the way down; ValueError names the field."""
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return read_value(kind, value, where)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} is {value!r}, not one of {', '.join(get_args(kind))}")
        return value
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r:.60}, not a value of type {kind.__name__}")
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}, not an object")
    hints = get_type_hints(kind)
    unknown = sorted(value.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{where} has an unknown field {unknown[0]!r}")
    for field in dataclasses.fields(kind):
        if field.name not in value and field.default is dataclasses.MISSING:
            raise ValueError(f"{where} lacks {field.name!r}")
    return kind(**{name: read_value(hints[name], each, f"{where}.{name}") for name, each in value.items()})


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {value!r:.60}, not a list")
    if kinds[-1] is Ellipsis:
        return tuple(read_value(kinds[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} values, not {len(kinds)}")
    return tuple(read_value(kind, each, where) for kind, each in zip(kinds, value, strict=True))


def _check(machine: Machine) -> None:
    """Refuse values that types allow and a machine can't have: negative ones, more free than in total."""
    for index, gpu in enumerate((*machine.gpus, *machine.others)):
        where = f"machine.gpus[{index}]" if index < len(machine.gpus) else "machine.others"
        if not 0 <= gpu.free_bytes <= gpu.total_bytes or not gpu.total_bytes:
            raise ValueError(f"{where}: {gpu.free_bytes} bytes free of {gpu.total_bytes}")
        if any(tenant.held_bytes < 0 for tenant in gpu.tenants):
            raise ValueError(f"{where}: a tenant holds less than nothing")
    if not 0 <= machine.ram_free_bytes <= machine.ram_total_bytes:
        raise ValueError(f"machine: {machine.ram_free_bytes} bytes free of {machine.ram_total_bytes} of RAM")
    if machine.cpu_cores < 1 or machine.disk_free_bytes < 0:
        raise ValueError("machine: no CPU core, or less than no disk space")
