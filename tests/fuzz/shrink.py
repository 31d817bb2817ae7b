"""Shortens a program that is wrong: lines, options, inputs and sizes go as long as the same stage stays wrong.

A line is left out by letting what it made be what it read, or a fresh input of the same shape. Nothing here knows what the
lines mean: a shorter program counts if it trains in eager PyTorch and the stage is wrong for it too.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator

import torch
from tests.fuzz.check import Wrong, examine
from tests.fuzz.draw import trains
from tests.fuzz.program import Line, Program

PLAIN = {"flags": {"lr": 0.1}, "step": {}, "guards": False, "plan_seed": 0, "groups": False, "frozen": 0}


def shrunk(program: Program, stage: str, seconds: float = 60.0) -> Program:
    """The shortest program found in that time which is wrong at that stage."""
    return shortest(program, lambda candidate: is_wrong(candidate, stage), seconds)


def is_wrong(program: Program, stage: str) -> bool:
    """Whether it trains in eager PyTorch and is wrong at that stage."""
    if not trains(program):
        return False
    try:
        examine(program.case(), (stage,))
    except Wrong:
        return True
    return False


def shortest(program: Program, fails: Callable[[Program], bool], seconds: float) -> Program:
    """Take the first shorter candidate that still fails, and begin again, until none does or time is up."""
    end = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in _shorter(program):
            if time.monotonic() > end:
                return program
            if candidate != program and fails(candidate):
                program, again = candidate, True
                break
    return program


def _shorter(program: Program) -> Iterator[Program]:
    """Candidates, those that take away most first."""
    for half in (program.lines[: len(program.lines) // 2], program.lines[len(program.lines) // 2 :]):
        if len(program.lines) > 3:
            yield from _without_lines(program, [line for line in half if line.results != ("loss",)])
    if program.aux:
        yield dataclasses.replace(program, aux=())
        yield from (dataclasses.replace(program, aux=tuple(a for a in program.aux if a != one)) for one in program.aux)
    loss = next(line for line in program.lines if line.results == ("loss",))
    if len(loss.reads) > 1:
        for name in loss.reads:
            rest = tuple(
                dataclasses.replace(line, code="{0}", reads=(name,)) if line is loss else line for line in program.lines
            )
            yield _cleaned(dataclasses.replace(program, lines=rest))
    for line in reversed(program.lines):
        if line.results != ("loss",):
            yield from _without_lines(program, [line])
    held = dict(program.options)
    if held["optimizer"] != "SGD":
        yield dataclasses.replace(
            program, options=tuple((held | {"optimizer": "SGD", "flags": PLAIN["flags"]}).items())
        )
    for name, value in PLAIN.items():
        if held[name] != value:
            yield dataclasses.replace(program, options=tuple((held | {name: value}).items()))
    yield from _smaller(program)


def _without_lines(program: Program, dropped: list[Line]) -> Iterator[Program]:
    """Without these lines: readers read what the line read, or a new input in its place."""
    lines = [line for line in program.lines if line not in dropped]
    for choice in range(2):
        now = list(lines)
        for line in reversed(dropped):
            for result in line.results:
                source = line.reads[min(choice, len(line.reads) - 1)] if line.reads else None
                if source is None:
                    continue
                now = [other.reading(result, source) for other in now]
        if choice == 0 or any(len(line.reads) > 1 for line in dropped):
            yield _cleaned(dataclasses.replace(program, lines=tuple(now)))
    if len(dropped) == 1 and len(dropped[0].results) == 1:
        fresh = _as_input(program, dropped[0])
        if fresh is not None:
            yield fresh


def _as_input(program: Program, line: Line) -> Program | None:
    """A batch brings what the line made."""
    found: dict[str, torch.Tensor] = {}
    try:
        probe = dataclasses.replace(program, aux=line.results)
        case = probe.case()
        found = case.build()[0](*case.batches(1)[0])[1]
    except (RuntimeError, ValueError, TypeError, NameError, IndexError, AttributeError):
        return None
    value = found[line.results[0]]
    if not value.is_floating_point() or value.dim() == 0:
        return None
    kind = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    entry = (line.results[0], f"torch.randn({list(value.shape)}{kind})")
    if value.requires_grad:  # it must still be trained
        member = (f"q{line.results[0]}", f"nn.Parameter({entry[1]})")
        other = Line(line.results, f"self.{member[0]} * 1.5")
        if line.code == other.code:
            return None
        lines = tuple(other if one is line else one for one in program.lines)
        return _cleaned(dataclasses.replace(program, lines=lines, members=(*program.members, member)))
    lines = tuple(one for one in program.lines if one is not line)
    return _cleaned(dataclasses.replace(program, lines=lines, inputs=(*program.inputs, entry)))


def _cleaned(program: Program) -> Program:
    """Without lines that lead to neither the loss nor an aux value; writes stay."""
    wanted = {"loss", *program.aux}
    kept: list[Line] = []
    for line in reversed(program.lines):
        if line.results and not wanted & set(line.results) and "_(" not in line.code:
            continue
        wanted |= set(line.reads)
        kept.insert(0, line)
    made = {name for line in kept for name in line.results} | {name for name, _ in program.inputs}
    aux = tuple(name for name in program.aux if name in made)
    return dataclasses.replace(program, lines=tuple(kept), aux=aux).tidy()


_NUMBER = re.compile(r"(?<![\w.])([2-9]|\d\d)(?![\w.])")


def _smaller(program: Program) -> Iterator[Program]:
    """One size less, everywhere it stands."""
    text = program.source()
    for size in sorted({int(found) for found in _NUMBER.findall(text)}, reverse=True):
        for new in (1, 2, size - 1):
            if new < size:
                swap = re.compile(rf"(?<![\w.]){size}(?![\w.])")
                yield dataclasses.replace(
                    program,
                    inputs=tuple((name, swap.sub(str(new), code)) for name, code in program.inputs),
                    members=tuple((name, swap.sub(str(new), code)) for name, code in program.members),
                    lines=tuple(dataclasses.replace(line, code=_sized(line.code, swap, new)) for line in program.lines),
                )


def _sized(code: str, swap: re.Pattern[str], new: int) -> str:
    """Sizes in the code, not the places of operands."""
    parts = re.split(r"(\{\d+\})", code)
    return "".join(part if part.startswith("{") and part.endswith("}") else swap.sub(str(new), part) for part in parts)
