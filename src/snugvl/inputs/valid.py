"""Whether values follow JSON schemas, in a process of its own: `python -m snugvl.inputs.valid`.

It validates what a grammar couldn't enforce, after the answer. Two references to the next part, in each of
thirty parts, are a billion looks, and nothing ends a thread, so it is asked as grammars are tried: the system
ends it when it takes too long (`trials.py`). Nothing is fetched: a reference out of the schema is an error.

    {"schemas": {"f": …}, "values": [["f", "{…}"], …]}  ─►  a line for each that doesn't follow its schema
"""

import json
import signal
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

from jsonschema_rs import (
    Draft202012Validator,
    FancyRegexOptions,
    ReferencingError,
    ValidationError,
    ValidationErrorKind,
    validator_for,
)

from snugvl.inputs.tools.enforceable import NOT_ENFORCED
from snugvl.inputs.trials import bound, serve

MOST: Final = 4  # violations of one value that are reported
SHOWN: Final = 60  # characters of a path
UNDECIDED: Final[Any] = (ValidationErrorKind.BacktrackLimitExceeded, ValidationErrorKind.RegexEngineFailure)
# Look-ahead and back references are what people's patterns have that a grammar can't; they may go back and
# forth for ever. A pattern compiles into so many bytes at most.
_PATTERNS: Final = FancyRegexOptions(backtrack_limit=100_000, size_limit=1 << 20, dfa_size_limit=1 << 20)


def broken(question: str) -> str:
    """A line for each value that doesn't follow its schema, or can't be told."""
    asked: dict[str, Any] = json.loads(question)
    validators: dict[str, Any] = {}
    found: list[str] = []
    for name, text in asked["values"]:
        if name not in validators:
            validators[name] = _validator(asked["schemas"][name])
        if isinstance(validators[name], str):
            found.append(f"{name}: {validators[name]}")
            continue
        try:
            value = json.loads(text)
        except ValueError:
            continue  # it was cut, and its end says so
        found += [f"{name}: {problem}" for problem in islice(_problems(validators[name], value), MOST)]
    return "\n".join(dict.fromkeys(found))


def _validator(schema: Mapping[str, Any]) -> Any:
    """The validator of a schema, or why there is none."""
    options: Any = {"offline": True, "pattern_options": _PATTERNS, "validate_formats": True}
    try:
        return validator_for(dict(schema), **options)
    except (ValidationError, ReferencingError):
        pass
    try:  # of an unknown dialect
        return Draft202012Validator({k: v for k, v in schema.items() if k != "$schema"}, **options)
    except (ValidationError, ReferencingError) as error:
        reason = str(getattr(error, "message", error)).splitlines()[0]
        return f"not validated, as its schema can't be used ({reason[:SHOWN]})"


def _problems(validator: Any, value: Any) -> Iterator[str]:
    for error in validator.iter_errors(value):
        words = [part for part in error.schema_path if isinstance(part, str)]
        # What a grammar left out is to blame, rather than what stands within it.
        keyword = next((word for word in words if word in NOT_ENFORCED), words[-1] if words else "false")
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
        place = path.lstrip(".")[:SHOWN] or "the whole"
        if isinstance(error.kind, UNDECIDED):
            yield f"{place} not validated, as {keyword} takes too much time"
        else:
            yield f"{place} breaks {keyword}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the parent
    bound()
    serve(lambda question: (broken(question), None))
