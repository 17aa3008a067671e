"""Scripts that may end their process: each runs in a child of one process that has imported what they all need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

_EACH = """
import json, os, sys
results = []
for script in json.loads(sys.argv[1]):
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(into, int(sys.argv[2]))
        exec(script)
        sys.stdout.flush()
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as said:
        text = said.read()
    results.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text.strip()))
print(json.dumps(results))
"""


def run_scripts(preamble: str, scripts: Mapping[str, str], stream: Literal[1, 2]) -> dict[str, tuple[int, str]]:
    """The exit status of each script, and what it said on a stream (1 output, 2 errors); the preamble runs once."""
    run = [sys.executable, "-c", preamble + _EACH, json.dumps(list(scripts.values())), str(stream)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, check=True)
    return {name: (status, text) for name, (status, text) in zip(scripts, json.loads(done.stdout), strict=True)}
