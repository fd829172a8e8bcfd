"""`snugvl doctor --log FILE`: why an engine failed, from its log."""

import sys
from pathlib import Path

from snugvl.cli.stdout import write
from snugvl.diagnose.explain import explain_file, explain_stream
from snugvl.diagnose.report import to_json, to_text


def run(path: str, *, json: bool) -> int:
    """Print the diagnosis of a file, or of standard input for "-"; the exit code is 0 whatever it says."""
    diagnosis = explain_stream(sys.stdin.buffer) if path == "-" else explain_file(Path(path))
    write(to_json(diagnosis) + "\n" if json else to_text(diagnosis))
    return 0
