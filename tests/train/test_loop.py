"""The training loop: exact resume, stops and skips, the folder of a run, what it writes and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.tiny_jobs import tiny_job
from torch import Tensor

import wholestep
from wholestep.errors import BadBatch, BadCheckpoint, BadLoss, BadOption, WholestepError
from wholestep.train import checkpoint_files, running
from wholestep.train.checkpoint_hashes import write_hashes
from wholestep.train.loop import Outcome, train
from wholestep.train.metrics import read_rows
from wholestep.train.run_folder import all_runs, new_run, newest_run, open_run
from wholestep.train.watch import Interrupted, Silent


def run(out: Path, *, resume: bool = False, backend: str = "interpret", options: Any = (), **job: Any) -> Outcome:
    made = tiny_job(**job)
    return train(made, out=out, resume=resume, backend=backend, **dict(options))


def state(folder: Path, number: int) -> dict[str, Tensor]:
    path = folder / "checkpoints" / f"step-{number:06d}"
    return {
        f"{name}/{k}": v for name in ("model", "optimizer") for k, v in load_file(path / f"{name}.safetensors").items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class TalksTo(Silent):
    """Calls back with every row."""

    def __init__(self, react: Any) -> None:
        self.react, self.notes = react, list[str]()

    def row(self, row: dict[str, Any]) -> None:
        self.react(row)

    def note(self, text: str) -> None:
        self.notes.append(text)


def at_step(number: int, what: Any) -> TalksTo:
    return TalksTo(lambda row: what() if row["step"] == number and "loss" in row else None)


# ---- what a run does and writes ----


def test_a_run_trains_and_writes_what_it_did(tmp_path: Path) -> None:
    outcome = run(tmp_path / "a", steps=30)
    assert (outcome.status, outcome.exit_code, outcome.steps) == ("finished", 0, 30)
    assert outcome.first_loss is not None and outcome.final_loss is not None and outcome.held_out is not None
    rows = read_rows(tmp_path / "a" / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert set(steps[-1]) == {"step", "loss", "lr", "grad_norm", "samples_per_second", "memory_bytes", "seconds"}
    assert steps[0]["lr"] == 0.05 and steps[-1]["lr"] == pytest.approx(0.05 * 0.5 ** (29 / 50))
    held = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    assert len(held) == 10 and held[-1] == outcome.held_out < held[0]
    facts = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (
        facts["status"] == "finished" and facts["settings"]["lr"] == 0.05 and facts["compile"]["rung"] == "whole step"
    )
    assert (tmp_path / "a" / "sample.txt").read_text().startswith("the sum of six ones is")
    assert "whole step" in (tmp_path / "a" / "explain.txt").read_text()


def test_measuring_in_between_neither_changes_the_training_nor_captures_again(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=12)
    run(tmp_path / "b", steps=12, held_out=(), write_sample=None)
    assert same(state(tmp_path / "a", 12), state(tmp_path / "b", 12))
    facts = json.loads((tmp_path / "a" / "run.json").read_text())
    assert facts["compile"]["captures"] == 1


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_five_steps_and_five_more_are_ten_bit_for_bit(tmp_path: Path, backend: str) -> None:
    run(tmp_path / "whole", steps=10, backend=backend)
    run(tmp_path / "parts", steps=5, backend=backend)
    outcome = run(tmp_path / "parts", steps=10, resume=True, backend=backend)
    assert outcome.steps_now == 5
    assert same(state(tmp_path / "whole", 10), state(tmp_path / "parts", 10))
    whole, parts = ([r for r in read_rows(tmp_path / n / "metrics.jsonl") if "loss" in r] for n in ("whole", "parts"))
    assert [(r["step"], r["loss"], r["lr"]) for r in whole] == [(r["step"], r["loss"], r["lr"]) for r in parts]


def test_a_finished_run_resumed_has_nothing_to_do(tmp_path: Path) -> None:
    first = run(tmp_path / "a", steps=4)
    again = run(tmp_path / "a", steps=4, resume=True)
    assert again.steps_now == 0 and again.exit_code == 0 and again.held_out == first.held_out
    told = [(row["step"], "loss" in row) for row in read_rows(tmp_path / "a" / "metrics.jsonl")]
    assert len(told) == len(set(told)), "nothing is written twice"


def test_checkpoints_come_every_so_often_and_the_newest_stay(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=10, options={"save_every": 2, "keep": 2})
    assert sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir()) == ["step-000008", "step-000010"]


def test_rows_beyond_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=6)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0, "seconds": 1}\n{"step": 8, "lo')  # a killed run's last words
    run(tmp_path / "a", steps=8, resume=True)
    steps = [row["step"] for row in read_rows(tmp_path / "a" / "metrics.jsonl") if "loss" in row]
    assert steps == list(range(1, 9))


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    job = tiny_job(steps=4)
    folder = new_run(tmp_path / "a", "a", {"settings": job.settings, "backend": "interpret", "name": "tiny"})
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "seconds": 0.1}\n')
    outcome = run(tmp_path / "a", steps=4, resume=True)
    assert outcome.steps_now == 4
    assert [r["step"] for r in read_rows(folder.path / "metrics.jsonl") if "loss" in r] == [1, 2, 3, 4]


# ---- losses that are not finite ----


def spoilt(*numbers: int) -> Any:
    def spoil(number: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "y": torch.full_like(batch["y"], math.nan)} if number in numbers else batch

    return spoil


def test_a_loss_that_is_not_finite_stops_the_run_with_a_sound_state(tmp_path: Path) -> None:
    outcome = run(tmp_path / "a", steps=10, spoil=spoilt(3))
    assert (outcome.status, outcome.exit_code, outcome.nonfinite_step) == ("nonfinite", 1, 4)
    assert outcome.trouble is not None and "step 4" in outcome.trouble and "--nonfinite skip" in outcome.trouble
    kept = state(tmp_path / "a", outcome.steps)
    assert all(t.isfinite().all() for t in kept.values())
    row = read_rows(tmp_path / "a" / "metrics.jsonl")[-1]
    assert row["loss"] is None and row["finite"] is False


def test_where_updates_are_not_held_back_the_run_stops_with_the_checkpoint_before(tmp_path: Path) -> None:
    """Layers are updated behind their backward passes, so the update of the bad step was made: it is not saved."""
    options = {"nonfinite": "allow", "save_every": 2}
    outcome = run(tmp_path / "a", steps=10, spoil=spoilt(5), options=options)
    assert (outcome.status, outcome.exit_code, outcome.nonfinite_step, outcome.skipped) == ("nonfinite", 1, 6, 0)
    assert outcome.checkpoint is not None and outcome.checkpoint.name == "step-000004"
    assert outcome.trouble is not None and "step-000004 is the last before it" in outcome.trouble
    assert all(t.isfinite().all() for t in state(tmp_path / "a", 4).values())
    assert not (tmp_path / "a" / "checkpoints" / f"step-{outcome.steps:06d}").exists()
    held, free = run(tmp_path / "b", steps=6), run(tmp_path / "c", steps=6, options=options)
    assert free.status == "finished" and free.final_loss == held.final_loss
    assert all(torch.equal(t, state(tmp_path / "c", 6)[name]) for name, t in state(tmp_path / "b", 6).items())


def test_skipping_leaves_the_bad_steps_out_and_counts_them(tmp_path: Path) -> None:
    display = at_step(0, lambda: None)
    outcome = run(tmp_path / "a", steps=10, spoil=spoilt(3, 4, 7), options={"nonfinite": "skip", "display": display})
    assert (outcome.status, outcome.exit_code, outcome.skipped) == ("finished", 0, 3)
    assert outcome.final_loss is not None and math.isfinite(outcome.final_loss)
    assert len(display.notes) == 2 and "step 4 is skipped" in display.notes[0], "told once per stretch"


def test_skipping_for_ever_is_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MOST_SKIPPED_IN_A_ROW", 4)
    outcome = run(tmp_path / "a", steps=20, spoil=spoilt(*range(5, 20)), options={"nonfinite": "skip"})
    assert (outcome.status, outcome.exit_code, outcome.steps) == ("nonfinite", 1, 9)
    assert outcome.trouble is not None and "4 steps in a row" in outcome.trouble


# ---- signals ----


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_saves_and_can_be_resumed(tmp_path: Path, number: int, code: int) -> None:
    outcome = run(tmp_path / "a", steps=10, options={"display": at_step(4, lambda: os.kill(os.getpid(), number))})
    assert (outcome.status, outcome.exit_code) == ("interrupted", code)
    assert outcome.trouble is not None and f"after step {outcome.steps} of 10" in outcome.trouble
    run(tmp_path / "a", steps=10, resume=True)
    run(tmp_path / "b", steps=10)
    assert same(state(tmp_path / "a", 10), state(tmp_path / "b", 10))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "handlers are put back"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(tmp_path / "a", steps=10, options={"display": at_step(4, twice), "save_every": 2})
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_signal_while_compiling_stops_at_once_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_step(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not reached")

    monkeypatch.setattr("wholestep.api.compile", compile_step)
    with pytest.raises(Interrupted) as raised:
        train(tiny_job(), out=tmp_path / "a")
    assert raised.value.number == signal.SIGTERM and list(tmp_path.iterdir()) == []


# ---- folders ----


def test_default_folders_are_numbered_and_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [train(tiny_job(steps=1), backend="interpret").folder for _ in range(3)]
    assert [str(name) for name in names] == ["runs/tiny-sums", "runs/tiny-sums-2", "runs/tiny-sums-3"]
    assert next(r.path for r in all_runs()) == names[-1], "the newest first"
    os.utime(names[0] / "run.json", (2e9, 2e9))
    assert newest_run("tiny", "sums").path == names[0]
    with pytest.raises(BadOption, match=r"no run of gpt-1m in runs/ to resume"):
        newest_run("gpt-1m", None)


def test_an_out_that_is_taken_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=1)
    with pytest.raises(BadOption, match=r"already holds a run.*--resume"):
        run(tmp_path / "a", steps=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(BadOption, match="holds files that are no run"):
        run(tmp_path / "b", steps=1)


def never_compiled(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the disk is tried before compiling")


def test_no_permission_is_told_before_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.api.compile", never_compiled)
    (tmp_path / "file").touch()
    with pytest.raises(BadOption, match=r"cannot be written to .*file/a: .*file is not a folder"):
        train(tiny_job(), out=tmp_path / "file" / "a")


def test_a_full_disk_is_told_before_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.api.compile", never_compiled)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(BadOption, match="1 B of disk left, one checkpoint takes about"):
        train(tiny_job(), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fills_up_names_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = at_step(5, lambda: monkeypatch.setattr(checkpoint_files, "save_tensors", full_disk))
    with pytest.raises(BadCheckpoint, match=r"No space left on device\. step-000004 is complete and kept"):
        run(tmp_path / "a", steps=10, options={"display": fill, "save_every": 2})
    monkeypatch.undo()
    assert run(tmp_path / "a", steps=10, resume=True).steps_now == 6


def test_metrics_that_cannot_be_written_name_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove() -> None:
        (tmp_path / "a" / "metrics.jsonl").unlink()
        (tmp_path / "a" / "metrics.jsonl").mkdir()

    with pytest.raises(
        WholestepError, match=r"metrics.jsonl could not be written: Is a directory\. checkpoint step-000002"
    ):
        run(tmp_path / "a", steps=10, options={"display": at_step(3, remove), "save_every": 2})


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=2)
    other = open_run(tmp_path / "a")
    other.take()
    with pytest.raises(BadOption, match="another process is training"):
        run(tmp_path / "a", steps=4, resume=True)
    other.release()
    run(tmp_path / "a", steps=4, resume=True)


# ---- resuming what does not fit ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.1}, r"trained with lr=0.05, asked for now is lr=0.1"),
        ({"steps": 2}, r"trained with steps=4, asked for now is steps=2"),
    ],
)
def test_changed_settings_are_named_with_both_values(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    run(tmp_path / "a", steps=4)
    with pytest.raises(BadOption, match=said):
        run(tmp_path / "a", resume=True, **({"steps": 4} | changes))


def test_another_backend_is_a_changed_setting(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=2)
    with pytest.raises(BadOption, match="backend='interpret', asked for now is backend='inductor'"):
        run(tmp_path / "a", steps=4, resume=True, backend="inductor")


@pytest.mark.parametrize("name", ["plan", "recipe"])
def test_a_run_goes_on_with_the_numbers_that_its_plan_or_recipe_decided(name: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    text = 'format = 1\nverbs = [{ precision = "0", to = "bf16" }]\n[end]\n'
    file.write_text(text)
    given = {"plan": wholestep.Plan(precision={"0": "bf16"}), "recipe": str(file)}[name]
    run(tmp_path / "a", steps=2, options={"compile_options": {name: given}})
    with pytest.raises(BadOption, match=rf"trained with {name}_digest='\w+', asked for now is {name}_digest=.not set"):
        run(tmp_path / "a", steps=4, resume=True)
    facts = tmp_path / "a" / "run.json"  # which has lost it
    kept = facts.read_text()
    settings = json.loads(kept)["settings"]
    edit(facts, settings={key: value for key, value in settings.items() if not key.endswith("_digest")})
    with pytest.raises(BadCheckpoint, match=rf"is of another run: it was trained with {name}_digest="):
        run(tmp_path / "a", steps=4, resume=True)
    facts.write_text(kept)
    file.write_text(text.replace('"0"', '"4"'))  # edited since
    other = wholestep.Plan(precision={"4": "bf16"}) if name == "plan" else given
    with pytest.raises(BadOption, match=f"{name}_digest"):
        run(tmp_path / "a", steps=4, resume=True, options={"compile_options": {name: other}})
    file.write_text(text)
    again = run(tmp_path / "a", steps=4, resume=True, options={"compile_options": {name: given}})
    assert again.steps == 4


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_checkpoints_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=2)
    facts = tmp_path / "a" / "checkpoints" / "step-000002" / "checkpoint.json"
    kept = facts.read_text()
    files = [path.name for path in facts.parent.iterdir() if path.name != "checkpoint.sha256"]
    for changes, said in (
        ({"version": 99}, "format version 99"),
        ({"format": "other"}, "not written by wholestep.save"),
    ):
        edit(facts, **changes)
        write_hashes(facts.parent, files)
        with pytest.raises(BadCheckpoint, match=said):
            run(tmp_path / "a", steps=4, resume=True)
        facts.write_text(kept)
    write_hashes(facts.parent, files)
    weights = facts.with_name("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BadCheckpoint, match=r"step-000002 is damaged: model.safetensors has 100 bytes instead of"):
        run(tmp_path / "a", steps=4, resume=True)


def test_a_damaged_newest_checkpoint_is_refused_and_the_good_one_can_be_taken(tmp_path: Path) -> None:
    run(tmp_path / "whole", steps=8)
    run(tmp_path / "a", steps=6, options={"save_every": 2})
    held = tmp_path / "a" / "checkpoints"
    weights = held / "step-000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"8 others")
    before = (tmp_path / "a" / "run.json").read_text()
    with pytest.raises(BadCheckpoint) as caught:
        run(tmp_path / "a", steps=8, resume=True)
    good = f"step-000004 is good: take it with `wholestep train --resume --out {held / 'step-000004'}`."
    assert "step-000006 is damaged: model.safetensors is not what was saved" in str(caught.value)
    assert str(caught.value).endswith(good) and (tmp_path / "a" / "run.json").read_text() == before
    notes = TalksTo(lambda row: None)
    outcome = run(held / "step-000004", steps=8, resume=True, options={"display": notes})
    assert outcome.steps_now == 4 and same(state(tmp_path / "a", 8), state(tmp_path / "whole", 8))
    assert notes.notes == ["a checkpoint after step-000004 was there; it is kept as set-aside-step-000006"]
    assert (held / "set-aside-step-000006").is_dir() and not (held / "step-000006").exists()
    assert run(tmp_path / "a", steps=8, resume=True).steps_now == 0, "what was set aside is not the newest"


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", steps=4)
    run(tmp_path / "b", steps=4, lr=0.1)
    place = tmp_path / "a" / "checkpoints" / "step-000004"
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "b" / "checkpoints" / "step-000004", place)
    with pytest.raises(
        BadCheckpoint, match=r"is of another run: it was trained with lr=0.1, this run has lr=0.05\. put the run's"
    ):
        run(tmp_path / "a", steps=6, resume=True)


HARMED: dict[str, bytes | None] = {
    "deeply nested": b"[" * 100_000, "nested in an entry": b'{"format": "wholestep run", "settings": ' + b"[" * 100_000,
    "truncated": b'{"format": "wholestep run", "ver', "empty": b"", "binary": bytes(range(256)), "a list": b"[1, 2]",
    "another file": b'{"epoch": 3}', "a folder": None,
    "settings as a list": b'{"format": "wholestep run", "version": 1, "settings": [3]}',
    "request as a text": b'{"format": "wholestep run", "version": 1, "request": "train"}',
    "steps as a text": b'{"format": "wholestep run", "version": 1, "steps": "many"}',
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMED)
def test_a_damaged_run_breaks_no_other(harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_run(None, "sound", {"name": "sound"})
    new_run(None, "harmed", {"name": "harmed"})
    path = Path("runs/harmed/run.json")
    path.unlink()
    if HARMED[harm] is None:
        path.mkdir()
    else:
        path.write_bytes(HARMED[harm] or b"")
    with pytest.warns(wholestep.WholestepWarning) as told:
        assert newest_run(None, None).path == Path("runs/sound")
    (line,) = [str(warning.message) for warning in told]
    assert line.startswith("runs/harmed/run.json ") and line.endswith("; this run is passed over") and "\n" not in line
    with pytest.raises(BadOption) as caught, warnings.catch_warnings(record=True) as quiet:
        open_run(Path("runs/harmed"))
    assert (
        str(caught.value).startswith("runs/harmed")
        and str(caught.value).endswith("there are runs/sound.")
        and not quiet
    )
    assert new_run(None, "harmed", {}).path == Path("runs/harmed-2")


def test_not_a_run_is_one_line(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no", "does not exist"), (tmp_path, "is not a run: it holds no run.json")):
        with pytest.raises(BadOption, match=said):
            open_run(path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(BadOption, match=r"run.json cannot be read"):
        open_run(tmp_path)
    edit_to = {"format": "wholestep run", "version": 99}
    (tmp_path / "run.json").write_text(json.dumps(edit_to))
    with pytest.raises(BadOption, match="format version 99"):
        open_run(tmp_path)


# ---- what compile refuses leaves nothing behind ----


def test_a_loss_that_is_no_scalar_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadLoss):
        run(tmp_path / "a", loss_fn=lambda model, batch: model(batch["x"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")
def test_a_batch_of_another_structure_is_told_and_does_no_harm(tmp_path: Path) -> None:
    job = tiny_job()
    step = wholestep.compile(job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret")
    step(job.batches.batch(0))
    before = {name: value.clone() for name, value in job.model.state_dict().items() if "weight" in name}
    with pytest.raises(BadBatch, match=r"the batch lacks 'y'.*KeyError.*compiled for tensors 'x', 'y'"):
        step({"x": job.batches.batch(1)["x"]})
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items() if name in before)
    assert step(job.batches.batch(1)).isfinite()


@pytest.mark.parametrize("options", [{"steps": 0}, {"save_every": 0}, {"nonfinite": "ignore"}])
def test_bad_arguments_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        run(tmp_path / "a", options=options)
    assert list(tmp_path.iterdir()) == []
