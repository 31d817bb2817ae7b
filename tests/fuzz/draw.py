"""Draws random programs: a seed in, a Program out that trains in eager PyTorch with finite numbers.

Lines are drawn one by one while their values are at hand, so that shapes fit: each is run as it is drawn, and one that torch
refuses, or that leaves the range of small finite numbers, is dropped. Sizes of 1 and 0, odd strides, views of views, writes
into views, mixed dtypes and broadcasting are what is looked for.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from typing import Any

import torch
from tests.fuzz import indexed, layers, losses, operators, rarer, training
from tests.fuzz.program import HEADER, Line, Program

MOST_ELEMENTS = 600
MOST_DIMENSIONS = 5
LARGEST = 1e4


class Room:
    """A program under construction: what it has so far, and the values of its names."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.namespace: dict[str, Any] = {}
        exec(HEADER, self.namespace)
        self.module = torch.nn.Module()
        self.namespace["self"] = self.module
        self.inputs: list[tuple[str, str]] = []
        self.members: list[tuple[str, str]] = []
        self.lines: list[Line] = []
        self.values: dict[str, torch.Tensor] = {}
        self.count = 0

    # ---- what operators ask for ----

    def name(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def size(self) -> int:
        return self.source.choice((1, 1, 1, 2, 2, 3, 3, 4, 5, 7))

    def shape(self, dims: int) -> list[int]:
        sizes = [self.size() for _ in range(dims)]
        if sizes and self.source.random() < 0.02:
            sizes[self.source.randrange(dims)] = 0
        return sizes

    def pick(self, wanted: Any = None) -> tuple[str, torch.Tensor] | None:
        """A value, the later the likelier."""
        fits = [name for name, value in self.values.items() if wanted is None or wanted(value)]
        if not fits:
            return None
        at = int(len(fits) * self.source.random() ** 0.5)
        return fits[at], self.values[fits[at]]

    def add_input(self, code: str) -> str:
        name = self.name("b")
        self.inputs.append((name, code))
        self.values[name] = self.namespace[name] = eval(code, self.namespace)
        return name

    def add_member(self, code: str, letter: str = "m") -> str:
        """A parameter, buffer or module; the code that reads it."""
        name = self.name(letter)
        setattr(self.module, name, eval(code, self.namespace))
        self.members.append((name, code))
        return f"self.{name}"

    def parameter(self, shape: list[int], scale: float = 0.4, dtype: str = "") -> str:
        options = f", dtype={dtype}" if dtype else ""
        return self.add_member(f"nn.Parameter(torch.randn({list(shape)}{options}) * {scale})", "p")

    # ---- adding lines ----

    def add(self, code: str, *reads: str, results: int = 1) -> bool:
        """Run the line and keep it if it is fit for use."""
        line = Line(tuple(self.name() for _ in range(results)), code, reads)
        before = dict(self.namespace)
        versions = {name: value._version for name, value in self.values.items()}
        try:
            exec(line.text(), self.namespace)
            made = [self.namespace[name] for name in line.results]
            fit = all(map(_fit, made)) and all(
                _fit(value) for name, value in self.values.items() if value._version != versions[name]
            )
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            fit = False
        if not fit:
            self.namespace.clear()
            self.namespace.update(before)
            if any(value._version != versions[name] for name, value in self.values.items()):
                raise _Spoiled
            return False
        self.lines.append(line)
        self.values.update(zip(line.results, made))
        return True


class _Spoiled(Exception):
    """A line that was dropped had written already."""


def _fit(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.numel() > MOST_ELEMENTS or value.dim() > MOST_DIMENSIONS:
        return False
    if value.dtype == torch.bool or value.is_complex():
        return value.dtype == torch.bool
    return value.numel() == 0 or float(value.detach().double().abs().max()) < LARGEST


def draw(seed: int) -> Program:
    """The program of that seed."""
    for attempt in range(100):
        source = random.Random(seed * 1000 + attempt)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(source.randrange(2**31))
            try:
                program = _drawn(source, wide=seed % 2 == 0)
            except _Spoiled:
                continue
            if program is not None and trains(program):
                return program
    raise AssertionError(f"seed {seed}: none of 100 programs trains")


def _drawn(source: random.Random, *, wide: bool) -> Program | None:
    """`wide`: with what `indexed.py` and `rarer.py` have too, among which faults that need two of a kind are met less often."""
    room = Room(source)
    is_net = source.random() < 0.45
    options = training.options(source)
    if is_net:
        layers.begin(room)
    else:
        operators.begin(room)
    for _ in range(source.randint(1, 4) if is_net else source.randint(3, 14)):
        plain = operators.TABLE | indexed.TABLE | rarer.TABLE if wide else operators.TABLE
        table = layers.TABLE if is_net and source.random() < 0.7 else plain
        makers, weights = list(table), list(table.values())
        for _ in range(4):
            if source.choices(makers, weights)[0](room):
                break
    if not losses.end(room, chunked=bool(options["step"].get("chunked_loss"))):
        return None
    if source.random() < 0.15:  # a result that is a view of a parameter or of the batch, or that is one
        _return_a_view(room)
    written = [n for n, v in room.values.items() if not n.startswith("b") and v.numel()]
    aux = tuple(source.sample(written, min(len(written), source.choice((0, 0, 1, 2)))))
    program = Program(tuple(room.inputs), tuple(room.members), tuple(room.lines), aux, tuple(options.items()))
    return _without_dead_lines(program).tidy()


def _return_a_view(room: Room) -> None:
    source = room.source
    held = [f"self.{name}" for name, _ in room.members if name.startswith("p")]
    form = source.choice(("{0}", "{0}.detach()", "{0}[:1]", "{0}.view(-1)", "{0}.mT"))
    if held and source.random() < 0.6:
        room.add(form.format(source.choice(held)))
    elif room.inputs:
        room.add(form, source.choice(room.inputs)[0])


def _without_dead_lines(program: Program) -> Program:
    """Most lines that lead nowhere go: Dynamo drops them anyway. Writes stay, and so does what they write to."""
    wanted = {"loss", *program.aux}
    kept: list[Line] = []
    for line in reversed(program.lines):
        if line.results and not wanted & set(line.results) and "_(" not in line.code and "self.b" not in line.code:
            continue
        wanted |= set(line.reads)
        kept.insert(0, line)
    return dataclasses.replace(program, lines=tuple(kept))


def trains(program: Program) -> bool:
    """Whether one eager step runs, with finite gradients; what does not is no case."""
    case = program.case()
    try:
        model, optimizer = case.build()
        with case.autocast():
            result = model(*case.batches(1)[0])
        loss = result[0] if isinstance(result, tuple) else result
        if loss.dim() or not loss.requires_grad or not bool(loss.isfinite()):
            return False
        loss.backward()
        optimizer.step()
    except Exception:  # whatever eager says of it
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return bool(gradients) and all(bool(g.isfinite().all()) for g in gradients)
