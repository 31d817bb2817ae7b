"""Triton bodies without a GPU: a program that compares them with their references, under Triton's interpreter."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys

import pytest

FORKS = """
import json, os, sys, traceback, torch, wholestep.ops, triton
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            exec(compile(json.loads(line), "interpreted", "exec"), {"__name__": "__main__"})
        except BaseException:
            print(traceback.format_exc()[-2000:])
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("ends here", flush=True)
"""


@functools.cache
def interpreting() -> subprocess.Popen[str]:
    """A process in which Triton interprets, which it decides when it is imported; every program has a fork of it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)
    return process


def assert_equal_when_interpreted(program: str) -> None:
    """The program ends with print("equal")."""
    pytest.importorskip("triton")
    process = interpreting()
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(program), file=process.stdin, flush=True)
    said = ""
    while (line := process.stdout.readline()) not in ("ends here\n", ""):
        said += line
    assert said.strip() == "equal", said
