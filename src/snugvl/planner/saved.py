"""A plan in a file: `snugvl plan --save FILE`, `snugvl serve --plan FILE`.

The file is the plan's JSON (`report/document.py`), so people and programs read it, too. What is run of it are
the model, what was asked for, and every setting of the choice; a footprint is computed again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from snugvl.core.options import LoadOptions
from snugvl.errors import InputError, RequestError
from snugvl.hardware.recording import read_value
from snugvl.planner.settings import Settings


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
        choice = values["choice"]
        model, given = choice["model"], choice["settings"]
        asked = LoadOptions(**values["load"]).said()
    except OSError as error:
        raise InputError(f"--plan {path} can't be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RequestError):
        raise InputError(
            f"--plan {path} holds no plan with a choice; make one: snugvl plan MODEL --save {path}"
        ) from None
    return SavedPlan(str(model), _settings(path, given), asked)


def _settings(path: Path, given: Any) -> Settings:
    """Every setting of the right type; one that a later version added has its default."""
    hints = get_type_hints(Settings)
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - hints.keys())):
        what = f"settings {', '.join(unknown)}" if isinstance(given, dict) else "no settings"
        raise InputError(f"--plan {path} has {what}, which this version doesn't know; save it again")
    for name, value in given.items():
        try:
            right = not isinstance(read_value(hints[name], value, name), int) or value >= 0
        except ValueError:
            right = False
        if not right:
            raise InputError(f"--plan {path}: setting {name} can't be {value!r}; save it again")
    return Settings(**{"engine": "native", **given})
