"""One run, once its step is compiled: restore, step until the end, save, and say how it went.

In: a Job, its folder and the compiled Step. Out: an Outcome. The loop never waits for the device: losses are looked at when they
have arrived. It waits where it has to: to save, and to measure the held-out loss.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from wholestep.errors import WholestepError, one_line
from wholestep.runtime.step import Step
from wholestep.train import checkpoint
from wholestep.train.checkpoint_files import Stored, set_aside_newer
from wholestep.train.held_out import evaluating, held_out_loss
from wholestep.train.job import Job
from wholestep.train.loggers import Loggers
from wholestep.train.metrics import (
    METRICS,
    Clock,
    LossWatch,
    Measured,
    Memory,
    MetricsFile,
    Speed,
    losses_of,
    number,
    steady_rate,
)
from wholestep.train.run_folder import EXPLAIN, SAMPLE, RunFolder, surroundings, write_file
from wholestep.train.watch import Display, Interrupts

HELD_OUT_TIMES = 10
"""How often a run measures its held-out loss: enough for a curve, little beside the training."""
SAVES = 10
FEWEST_STEPS_BETWEEN_SAVES = 25
SECONDS_BETWEEN_SAVES = 600.0
"""Without --save-every, a slow run is also saved by the clock."""
MOST_SKIPPED_IN_A_ROW = 50
"""`--nonfinite skip` gives up after so many: a model that never gets a finite gradient again is not training."""
MOST_SCALED_IN_A_ROW = 31
"""In fp16 a gradient that overflows halves the loss scale, 30 times until the least: one more is no fault of the scale."""

Status = Literal["finished", "interrupted", "nonfinite"]


@dataclasses.dataclass(slots=True, kw_only=True, repr=False)
class Outcome:
    """How a run went. Printed it reads as the end of `wholestep train` does."""

    status: Status
    exit_code: int
    folder: Path
    steps: int
    """Taken in all, earlier parts of the run included."""
    steps_now: int
    """Taken by this call."""
    first_loss: float | None
    final_loss: float | None
    held_out: float | None
    sample: str | None
    seconds: float
    """Spent training, over the whole run; without compiling, saving and measuring."""
    compile_seconds: float
    units_per_second: float | None
    unit: str
    memory_bytes: int
    skipped: int
    """Steps left out because a loss or gradient was not finite."""
    skipped_by_scale: int
    """Steps left out by the loss scale of fp16, which such steps are there to find."""
    nonfinite_step: int | None
    checkpoint: Path | None
    signal: int | None = None
    trouble: str | None = None
    """What is to be told at the end, in one line."""

    def __str__(self) -> str:
        from wholestep.train.summary import outcome_lines

        return "\n".join(outcome_lines(self))

    def __repr__(self) -> str:
        from wholestep.train.summary import headline

        return f"<{' '.join(headline(self).split())}>"

    def _repr_html_(self) -> str:
        from wholestep.train.summary import outcome_html

        return outcome_html(self)


class Run:
    """One call of `train`, once the step is compiled: `begin`, `loop`, `finish`."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        step: Step,
        steps: int,
        save_every: int | None,
        keep: int | None,
        nonfinite: str,
        display: Display,
        interrupts: Interrupts,
        compile_seconds: float,
        loggers: Loggers,
    ) -> None:
        self.job, self.folder, self.step, self.steps, self.keep = job, folder, step, steps, keep
        self.nonfinite, self.display, self.interrupts = nonfinite, display, interrupts
        self.compile_seconds, self.loggers = compile_seconds, loggers
        self.save_every = save_every or max(steps // SAVES, FEWEST_STEPS_BETWEEN_SAVES)
        self.by_clock = save_every is None
        self.held_out_every = max(steps // HELD_OUT_TIMES, 1)
        self.watch = LossWatch(step.subject.device)
        self.memory = Memory(step.subject.device)
        self.speed = Speed(job.batches.units)
        self.taken = 0
        self.saved: Path | None = None
        self.saved_at = -1
        self.bad_step: int | None = None
        self.skipped = self.skipped_by_scale = self.skipped_in_a_row = 0

    # ---- the beginning ----

    def begin(self, stored: Stored | None, config: Mapping[str, Any]) -> None:
        """Restore the checkpoint, if there is one, and open the files. `config`: what the run was asked for, for loggers."""
        at = 0
        if stored is not None:
            found = checkpoint.restore(
                stored, model=self.job.model, optimizer=self.job.optimizer, scheduler=self.job.scheduler, step=self.step
            )
            at, self.saved, self.saved_at = found.number, stored.path, found.number
            if not isinstance(found.data, dict) or found.data.get("batch") != at:
                raise WholestepError(
                    f"{stored.path} does not say where the data stood", hint="it was not saved by this command"
                )
            for path in set_aside_newer(self.folder.checkpoints, at):
                self.display.note(f"a checkpoint after {stored.path.name} was there; it is kept as {path.name}")
        self.metrics = MetricsFile(self.folder.path / METRICS, resume_at=at)
        rows = self.metrics.rows
        self.skipped_by_scale = sum(1 for row in rows if row.get("by_loss_scale"))
        self.skipped = sum(1 for row in rows if row.get("skipped")) - self.skipped_by_scale
        self.loggers.start(config, self.folder.path, at)
        self.clock = Clock(before=float(rows[-1].get("seconds", 0.0)) if rows else 0.0)
        self.last_save = time.monotonic()
        self._write_facts("training")
        self.display.started(at=at, steps=self.steps, unit=self.job.batches.unit)

    def _write_facts(self, status: str, **more: Any) -> None:
        step = self.step
        graph = step.graph
        captured = {
            "rung": step.rung, "operations": 0 if graph is None else len(list(graph.operations())),
            "captures": step.captures, "compilations": step.compilations, "seconds": round(self.compile_seconds, 3),
            "falls": [str(fall) for fall in step.falls], "notes": list(step.notes),
        }  # fmt: skip
        write_file(self.folder.path / EXPLAIN, step.explain() + "\n")
        self.folder.update(status=status, compile=captured, **surroundings(step.subject.device), **more)

    # ---- the loop ----

    def loop(self) -> Status:
        """Step by step until the end, a signal, or a loss that is not finite."""
        job, step = self.job, self.step
        self.interrupts.can_save = True
        while step.count < self.steps:
            lr = _learning_rate(job.optimizer)
            result = step(job.batches.batch(step.count))
            loss = result[0] if isinstance(result, tuple) else result
            if job.scheduler is not None:
                job.scheduler.step()
            self.taken += 1
            self.watch.push(step.count, loss, step.grad_norm, lr)
            self._note(self.watch.ready())
            if self.interrupts.received is not None:
                return "interrupted"
            if self._gives_up():
                return "nonfinite"
            last = step.count == self.steps
            if step.count % self.held_out_every == 0 and not last:
                self._measure_held_out()
            if not last and self._save_is_due():
                self._save()
        self._note(self.watch.ready(wait=True))
        return "nonfinite" if self._gives_up() else "finished"

    def _note(self, measured: list[Measured]) -> None:
        """Rows for the steps whose numbers have arrived."""
        if not measured:
            return
        seconds, memory = self.clock.seconds, self.memory.bytes()
        rate = self.speed.after(measured[-1].step, seconds)
        for one in measured:
            row: dict[str, Any] = {
                "step": one.step, "loss": number(one.loss), "lr": one.lr, "grad_norm": number(one.grad_norm),
                f"{self.job.batches.unit}_per_second": None if rate is None else round(rate, 1), "memory_bytes": memory,
                "seconds": round(seconds, 4),
            }  # fmt: skip
            self.skipped_in_a_row = 0 if one.finite else self.skipped_in_a_row + 1
            if not one.finite:
                row |= {"finite": False, "skipped": self.nonfinite != "allow"}
                if self._is_the_scales(one):
                    row["by_loss_scale"] = True
                    self.skipped_by_scale += 1
                else:
                    self.skipped += int(self.nonfinite != "allow")
                    self._tell_skipped(one)
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl, to everybody who wants it."""
        self.metrics.add(row)
        self.loggers.log(row)
        self.display.row(row)

    def _is_the_scales(self, one: Measured) -> bool:
        """An overflow of gradients in fp16 with a finite loss: part of training there, unless it never ends."""
        scaled = self.step.subject.loss_scale is not None and math.isfinite(one.loss)
        return scaled and self.skipped_in_a_row < MOST_SCALED_IN_A_ROW

    def _tell_skipped(self, one: Measured) -> None:
        if self.bad_step is None:
            self.bad_step = one.step
        if self.nonfinite == "skip" and self.skipped_in_a_row == 1:
            norm = "" if one.grad_norm is None else f", gradient norm {one.grad_norm:.4g}"
            self.display.note(f"step {one.step} is skipped: loss {one.loss:.4g}{norm}")

    def _gives_up(self) -> bool:
        if self.nonfinite == "skip":
            return self.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW
        return self.bad_step is not None

    def _measure_held_out(self) -> float | None:
        if not self.job.held_out:
            return None
        self._note(self.watch.ready(wait=True))  # their time is training, and must not fall into the pause
        with self.clock.paused():
            loss = held_out_loss(self.step.subject, self.job.held_out)
        row = {"step": self.step.count, "held_out_loss": number(loss), "seconds": round(self.clock.seconds, 4)}
        self._add(row)
        return number(loss)

    def _save_is_due(self) -> bool:
        late = self.by_clock and time.monotonic() - self.last_save > SECONDS_BETWEEN_SAVES
        return self.step.count % self.save_every == 0 or late

    def _save(self) -> None:
        if self.saved_at == self.step.count:
            return
        self._note(self.watch.ready(wait=True))
        self.metrics.flush()
        self.loggers.flush()
        if self.nonfinite == "allow" and self.bad_step is not None:
            return  # the update was made: the last checkpoint is what there is to go on from
        with self.clock.paused():
            self.saved = checkpoint.save(
                self.folder.checkpoints, model=self.job.model, optimizer=self.job.optimizer, scheduler=self.job.scheduler,
                step=self.step, data={"batch": self.step.count}, config=self.job.settings, files=self.job.files, keep=self.keep,
            )  # fmt: skip
        self.saved_at, self.last_save = self.step.count, time.monotonic()
        self.display.saved(self.saved)

    # ---- the end ----

    def finish(self, status: Status) -> Outcome:
        """Save, measure once more, and say how it went."""
        self._note(self.watch.ready(wait=True))
        self._save()
        held_out = sample = None
        if status == "finished":
            held_out = self._last_held_out()
            with self.clock.paused():
                sample = self._sample()
        self.metrics.flush()
        if sample is not None:
            write_file(self.folder.path / SAMPLE, sample.rstrip("\n") + "\n")
        outcome = self._outcome(status, held_out, sample)
        told = {
            "steps": outcome.steps, "first_loss": outcome.first_loss, "final_loss": outcome.final_loss,
            "held_out_loss": held_out, "skipped": self.skipped, "skipped_by_scale": self.skipped_by_scale,
            "seconds": round(outcome.seconds, 3), "trouble": outcome.trouble,
        }  # fmt: skip
        self._write_facts(status, result=told)
        return outcome

    def _last_held_out(self) -> float | None:
        """Measured at the last step; a finished run that is resumed has it already."""
        known = dict(losses_of(self.metrics.rows, "held_out_loss"))
        return known[self.step.count] if self.step.count in known else self._measure_held_out()

    def _sample(self) -> str | None:
        if self.job.write_sample is None:
            return None
        try:
            with evaluating(self.step.subject.root):
                return self.job.write_sample()
        except Exception as error:  # a run that trained well is not lost for its sample
            self.display.note(f"no sample could be written: {one_line(error)}")
            return None

    def _outcome(self, status: Status, held_out: float | None, sample: str | None) -> Outcome:
        losses = losses_of(self.metrics.rows)
        signal = self.interrupts.received if status == "interrupted" else None
        code = {"finished": 0, "nonfinite": 1, "interrupted": 128 + (signal or 0)}[status]
        unit = self.job.batches.unit
        return Outcome(
            status=status, exit_code=code, folder=self.folder.path, steps=self.step.count, steps_now=self.taken,
            first_loss=losses[0][1] if losses else None, final_loss=losses[-1][1] if losses else None,
            held_out=held_out, sample=sample, seconds=self.clock.seconds, compile_seconds=self.compile_seconds,
            units_per_second=steady_rate(self.metrics.rows[-self.taken :], self.job.batches.units), unit=unit,
            memory_bytes=self.memory.bytes(), skipped=self.skipped, skipped_by_scale=self.skipped_by_scale,
            nonfinite_step=self.bad_step, checkpoint=self.saved, signal=signal, trouble=self._trouble(status),
        )  # fmt: skip

    def _trouble(self, status: Status) -> str | None:
        if status == "interrupted":
            return f"stopped after step {self.step.count} of {self.steps}; the state is saved"
        if status != "nonfinite":
            return None
        if self.nonfinite == "skip":
            return f"{self.skipped_in_a_row} steps in a row were skipped, up to step {self.step.count}; try a lower learning rate"
        if self.nonfinite == "allow":
            kept = "nothing was saved before" if self.saved is None else f"{self.saved.name} is the last before it"
            return f"the loss is not finite at step {self.bad_step}, and its update was made; {kept}; try a lower learning rate"
        return (
            f"the loss or its gradient is not finite at step {self.bad_step}; stopped after step {self.step.count}, with the "
            "update of that step left out; try a lower --set lr=, --set clip_norm=1.0, --precision fp32, or --nonfinite skip"
        )


def _learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    lr = optimizer.param_groups[0].get("lr")
    return float(lr) if isinstance(lr, int | float) else None  # a tensor on a GPU would be waited for
