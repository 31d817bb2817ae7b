"""Processes that start at once: forks of one that has imported what they need, and has run nothing."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

OURS = "import torch, wholestep.api, wholestep.train.loop"
TRANSFORMERS = (
    "import torch\nfrom transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer"
)
"""Of processes that open models without Wholestep."""
SERVER = """
import json, os, sys, traceback
{imports}
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            program, folder, arguments = json.loads(line)
            os.chdir(folder)
            sys.argv[1:] = arguments
            exec(compile(program, "forked", "exec"), {{"__name__": "__main__"}})
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (0, None)):
                print(traceback.format_exc()[-3000:])
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("ends here", flush=True)
"""


@functools.cache
def _server(imports: str, environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER.format(imports=imports)]
    environ = os.environ | dict(environment) | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def run_in_fork(
    program: str, *arguments: str, imports: str = OURS, folder: str | Path = ".", **environment: str
) -> str:
    """What a program prints, and where it raises, the end of its traceback; in a process that began with these imports, under
    these variables."""
    process = _server(imports, tuple(environment.items()))
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps([program, str(Path(folder).absolute()), arguments]), file=process.stdin, flush=True)
    said = ""
    while (line := process.stdout.readline()) not in ("ends here\n", ""):
        said += line
    return said
