"""`snugvl` in a process of its own, with a scripted backend instead of a model.

`python -m tests.cli.fake_main ARGUMENTS`. FAKE_DELAY is the time a word takes, FAKE_ANSWER an answer to
everything, FAKE_READY a file that is made when the model is loaded; FAKE_BUG makes loading fail in a way
nobody foresaw.
"""

import os
from pathlib import Path

from snugvl.cli import session
from snugvl.cli.app import main
from snugvl.model import Model


def load_model(choice: object) -> Model:
    from tests.tasks.fake import FakeBackend, sensible

    if os.environ.get("FAKE_BUG"):
        raise ZeroDivisionError("a bug")
    if ready := os.environ.get("FAKE_READY"):
        Path(ready).touch()
    answer = os.environ.get("FAKE_ANSWER")
    script = (lambda _: answer) if answer is not None else sensible
    return Model(FakeBackend(script, delay=float(os.environ.get("FAKE_DELAY", "0"))))


if __name__ == "__main__":
    session.load_model = load_model
    main()
