"""What `wholestep train` shows while it trains: a live bar on a terminal, a few plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import rate

if TYPE_CHECKING:
    from wholestep.runtime.step import Step

LINES_PER_RUN = 10


def duration(seconds: float) -> str:
    """`4.2 s`, `3:07` or `2:03:07`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Quiet:
    """Only what has to be said."""

    verbose: bool | None = False

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.at = self.steps = 0
        self.unit = "units"
        self.held_out: float | None = None
        self.first: tuple[int, float] | None = None

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def note(self, text: str) -> None:
        self.say(f"note: {text}")

    def compiling(self, backend: str) -> None: ...

    def compiled(self, step: Step, seconds: float) -> None: ...

    def started(self, *, at: int, steps: int, unit: str) -> None:
        self.at, self.steps, self.unit = at, steps, unit

    def row(self, row: dict[str, Any]) -> None:
        if "held_out_loss" in row:
            self.held_out = row["held_out_loss"]

    def saved(self, path: Path) -> None: ...

    def close(self) -> None: ...

    def figures(self, row: dict[str, Any]) -> dict[str, Any]:
        """The numbers of a row, ready to be shown."""
        speed = row.get(f"{self.unit}_per_second")
        if self.first is None:  # the first step also checks and compiles: the others tell how long it will take
            self.first = (row["step"], time.monotonic())
        taken = row["step"] - self.first[0]
        left = (time.monotonic() - self.first[1]) / taken * (self.steps - row["step"]) if taken > 0 else None
        return {
            "loss": "loss not finite" if row.get("loss") is None else f"loss {row['loss']:.4f}",
            "held_out": "" if self.held_out is None else f"held out {self.held_out:.4f}",
            "speed": "" if speed is None else f"{rate(speed)} {self.unit}/s",
            "memory": show_bytes(row.get("memory_bytes", 0)),
            "left": "" if not left else f"{duration(left)} left",
        }


class Lines(Quiet):
    """Plain lines: what was compiled, then about ten over the run."""

    def compiling(self, backend: str) -> None:
        self.say(f"compiling the whole step, backend {backend} ...")

    def compiled(self, step: Step, seconds: float) -> None:
        graph = step.graph
        what = f"{step.rung}, {len(list(graph.operations()))} operations" if graph is not None else step.rung
        self.say(f"compiled in {duration(seconds)}: {what}")
        for note in step.notes:
            if note.kind == "memory":
                self.say(note)

    def started(self, *, at: int, steps: int, unit: str) -> None:
        super().started(at=at, steps=steps, unit=unit)
        self.every = max((steps - at) // LINES_PER_RUN, 1)
        if at:
            self.say(f"resumed after step {at}")

    def row(self, row: dict[str, Any]) -> None:
        super().row(row)
        if "loss" not in row or (row["step"] != self.at + 1 and (row["step"] - self.at) % self.every):
            return
        told = "  ".join(filter(None, self.figures(row).values()))
        self.say(f"step {row['step']:>{len(str(self.steps))}}/{self.steps}  {told}")


class Bar(Lines):
    """A live bar. Compiling shows its own progress on a terminal."""

    verbose: bool | None = None

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=stream)
        wide = console.width >= 104
        held_out = "  {task.fields[held_out]}" if wide else ""
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=20 if wide else 12),
            TextColumn("[bold]{task.fields[loss]}[/bold]" + held_out),
            TextColumn("{task.fields[speed]}  {task.fields[memory]}  {task.fields[left]}"),
            console=console, refresh_per_second=5, expand=False,
        )  # fmt: skip
        self.running = False

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def compiling(self, backend: str) -> None: ...

    def started(self, *, at: int, steps: int, unit: str) -> None:
        super().started(at=at, steps=steps, unit=unit)
        blank: dict[str, Any] = dict.fromkeys(("loss", "held_out", "speed", "memory", "left"), "")
        self.task = self.progress.add_task("", total=steps, completed=at, **blank)
        self.progress.start()
        self.running = True

    def row(self, row: dict[str, Any]) -> None:
        Quiet.row(self, row)
        if "loss" in row:
            self.progress.update(self.task, completed=row["step"], **self.figures(row))

    def close(self) -> None:
        if self.running:
            self.running = False
            self.progress.stop()


def make_display(stream: IO[str], *, quiet: bool) -> Quiet:
    """The display that suits where the output goes."""
    if quiet:
        return Quiet(stream)
    return Bar(stream) if stream.isatty() else Lines(stream)
