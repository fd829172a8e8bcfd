"""Several of the scripts beside this, one after the other in one process: what each prints, in one object.

    python together.py SERVER WILLING PICTURE SCRIPT…

Each runs as if it were started alone; most of its time would go into the imports that they share.
"""

import contextlib
import io
import json
import runpy
import sys

scripts = sys.argv[4:]
outcomes = {}
for script in scripts:
    print(script, file=sys.stderr)  # which a failure shows
    sys.argv = [script, *sys.argv[1:4]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    outcomes[script] = json.loads(printed.getvalue())
print(json.dumps(outcomes))
