"""A plan in a file: `snugvl plan --save FILE`, `snugvl serve --plan FILE`.

The file is the plan's JSON (`report/document.py`), so people and programs read it, too. What is run of it are
the model, what was asked for, and every setting of the choice; a footprint is computed again.
"""

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from snugvl.core.options import LoadOptions
from snugvl.errors import InputError
from snugvl.planner.settings import Settings

OF_WISHES = ("context", "max_pixels", "language_only", "tower", "embedding", "purpose", "backend")


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What a file says is to run."""

    model: str
    settings: Settings
    asked: dict[str, Any]

    def over(self, load: LoadOptions) -> LoadOptions:
        """The options of the plan, with those that were said now; the file names the model.

        Raises:
            InputError: another model was named.
        """
        if load.model not in ("", self.model):
            raise InputError(f"the plan is of {self.model}, not of {load.model}; leave the model out")
        return LoadOptions(**{**self.asked, **load.said(), "model": self.model})


def read(path: Path) -> SavedPlan:
    """A plan that was saved.

    Raises:
        InputError: there is no such file, or it holds no plan with a choice; names what is wrong.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        choice, wishes = values["choice"], values["wishes"]
        model, given = choice["model"], choice["settings"]
        asked = {name: wishes[name] for name in OF_WISHES if wishes.get(name) is not None}
    except OSError as error:
        raise InputError(f"--plan {path} can't be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"--plan {path} holds no plan with a choice; make one: snugvl plan MODEL --save {path}"
        ) from None
    return SavedPlan(str(model), _settings(path, given), asked)


def _settings(path: Path, given: Any) -> Settings:
    """Every setting of the right type; one that a later version added has its default."""
    hints, values = get_type_hints(Settings), {}
    known = {each.name for each in fields(Settings)}
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - known)):
        what = f"settings {', '.join(unknown)}" if isinstance(given, dict) else "no settings"
        raise InputError(f"--plan {path} has {what}, which this version doesn't know; save it again")
    for name, value in given.items():
        allowed = get_args(hints[name]) or (hints[name],)
        literal = [each for each in allowed if not isinstance(each, type)]
        kinds = tuple(each for each in allowed if isinstance(each, type))
        right = value in literal if literal and value is not None else type(value) in kinds
        if not right or (isinstance(value, int) and value < 0):
            raise InputError(f"--plan {path}: setting {name} can't be {value!r}; save it again")
        values[name] = value
    try:
        return replace(Settings("native"), **values)
    except TypeError as error:  # pragma: no cover (names are checked above)
        raise InputError(f"--plan {path}: {error}") from None
