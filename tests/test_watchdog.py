"""A test that waits in vain is ended and says where; one that computes, or waits for who computes, is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.test_readme import ROOT

IDLE_S = 0.5
BUSY = f"end = time.process_time() + {2 * IDLE_S}\nwhile time.process_time() < end: pass"
HANG = {
    "thread": "threading.Event().wait(3000)",
    "loop": "asyncio.run(until_async(lambda: False, 3000))",
    "process": "subprocess.run([sys.executable, '-c', 'import time; time.sleep(3000)'])",
}
WORK = {"process": f"subprocess.run([sys.executable, '-c', {'import time; ' + BUSY!r}])"}
IMPORTS = "import asyncio, socket, subprocess, sys, threading, time\nfrom tests.patience import until_async\n"


def test_who_waits_in_vain_is_ended_and_who_works_is_not(tmp_path: Path) -> None:
    bodies = {f"test_hang_{name}": body for name, body in HANG.items()}
    bodies |= {f"test_work_{name}": body for name, body in WORK.items()}
    defined = "".join(f"def {name}():\n    {body}\n" for name, body in bodies.items())
    (tmp_path / "test_all.py").write_text(IMPORTS + defined, encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "tests.watchdog", "-p", "no:cacheprovider",
         "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"SNUGVL_TESTS_IDLE_S": str(IDLE_S), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    out = told.stdout
    assert set(re.findall(r"^FAILED .*::(\w+)", out, re.MULTILINE)) == {f"test_hang_{name}" for name in HANG}
    assert set(re.findall(r"^PASSED .*::(\w+)", out, re.MULTILINE)) == {f"test_work_{name}" for name in WORK}
    assert out.count(f"Failed: nothing has moved for {IDLE_S:g} s") >= len(HANG)
    where = re.compile(r"Current thread .*\n(?: *File .*\n)*? *File .*test_all.py.* in (\w+)")
    assert set(where.findall(out)) == {f"test_hang_{name}" for name in HANG}, "it is told where each waits"
