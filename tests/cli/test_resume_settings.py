"""Every option of `wholestep train` survives a resume that does not repeat it, and is taken or refused by name where it is given.

The options are walked as the command has them: a new one fails here until it says which of both it is.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.cli.calls import Call
from tests.data.own_files import texts

from wholestep.cli import train as command
from wholestep.train import loop, plan_use, request, wishes

PARAMETERS = tuple(inspect.signature(command.command).parameters)
SMALL: dict[str, Any] = {
    "sets": ["width=16", "layers=1", "heads=2", "tokenizer=bytes"], "batch": "2", "seq": "16", "steps": "2",
}  # fmt: skip
VALUES: dict[str, tuple[Any, Any]] = {
    "model": ("gpt-1m", "bert-6m"), "sets": (["dropout=0.25"], ["dropout=0.5"]), "data": ("stdlib", "shakespeare"),
    "glob": ("*.md", "*.txt"), "field": ("body", "title"), "tokenizer": ("bytes", "bpe"),
    "batch": ("3", "4"), "seq": ("12", "8"), "precision": ("bf16", "fp16"), "steps": ("5", "7"), "seed": ("9", "8"),
    "init": ("w", "v"), "backend": ("interpret", "inductor"), "disable": (["fold_casts"], ["fold_views"]),
    "memory": ("8GiB", "9GiB"), "host_memory": ("2GiB", "3GiB"), "offload_path": (["slow"], ["slower"]),
    "plan": ("a.toml", "b.toml"), "recipe": ("c.toml", "d.toml"),
    "nonfinite": ("skip", "stop"), "save_every": ("3", "4"),
    "log": ("csv", "csv,tensorboard"),
}  # fmt: skip
"""Two values of each, none the default."""
SET_TO = {
    "lr": "0.125", "weight_decay": "0.25", "warmup": "7", "schedule": "cosine", "clip_norm": "0.75", "accumulate": "2",
    "optimizer": "sgd", "tokenizer": "bytes", "vocabulary": "300", "seed": "5",
}  # fmt: skip


def words(asked: dict[str, Any]) -> list[str]:
    """The command line of these parameters."""
    found = [asked["model"]] if "model" in asked else []
    for name, value in asked.items():
        flag = "--set" if name == "sets" else f"--{name.replace('_', '-')}"
        if name != "model":
            found += (
                [flag]
                if value is True
                else [w for v in (value if isinstance(value, list) else [value]) for w in (flag, v)]
            )
    return found


Observe = Callable[..., dict[str, Any] | str]


@pytest.fixture
def observe(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observe:
    """What `train` is called with for these words, as JSON; the error where it is none. Nothing is compiled."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(request, "plan_at", lambda path: path)
    monkeypatch.setattr(plan_use, "fitting", lambda plan, settings: plan)
    seen: list[dict[str, Any]] = []

    def train(job: Any, *, out: Path | None, resume: bool, request: Any, compile_options: Any, **rest: Any) -> None:
        passes = compile_options.pop("passes", None)
        names = None if passes is None else [str(getattr(p, "__name__", p)) for p in (*passes.passes, *passes.apply)]
        kept = {name: rest[name] for name in ("nonfinite", "save_every", "backend")}
        made = {**job.compile_options, "backend": rest["backend"], **compile_options}
        loop._folder(job, out, resume, job.settings["steps"], request, made)
        logs = [type(logger).__name__ for logger in rest["loggers"]]
        seen.append({**kept, **made, "log": logs, "passes": names, "settings": job.settings})
        raise typer.Exit(0)

    monkeypatch.setattr(loop, "train", train)

    def observed(*arguments: str) -> dict[str, Any] | str:
        seen.clear()
        done = call("train", *arguments)
        if done.code == 0:
            return json.loads(json.dumps(seen[0]))
        assert done.code == 2 and len(done.err.splitlines()) == 1, done.err
        return done.err

    return observed


def test_every_option_is_kept_or_of_this_call() -> None:
    assert set(PARAMETERS) == set(request.ASKED) | set(request.OF_THIS_CALL)
    assert not set(request.ASKED) & set(request.OF_THIS_CALL)
    assert set(VALUES) == set(request.ASKED), "give every option that is kept two values"
    assert set(SET_TO) == set(wishes.TRAINING) | {"seed"}, "and every training value one"


def start_of(name: str, tmp_path: Path) -> dict[str, Any]:
    """A small run with this option."""
    asked = {**SMALL, name: VALUES[name][0]}
    if name == "sets":
        asked["sets"] = [*SMALL["sets"], *VALUES[name][0]]
    if name == "init":
        from transformers import GPT2Config, GPT2LMHeadModel

        for folder in VALUES["init"]:
            model = GPT2LMHeadModel(GPT2Config(vocab_size=260, n_positions=16, n_embd=8, n_layer=1, n_head=1))
            model.save_pretrained(tmp_path / folder)
        asked = {**asked, "model": "w", "sets": ["tokenizer=bytes"]}
    if name == "glob":
        texts(tmp_path / "notes")
        asked["data"] = "notes"
    if name == "field":
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a" * 99, "body": "b" * 99, "title": "c" * 99}) + "\n")
        asked["data"] = "rows.jsonl"
    if name == "offload_path":
        for folders in VALUES[name]:
            (tmp_path / folders[0]).mkdir()
    if name == "recipe":
        for number, file in enumerate(VALUES[name]):
            (tmp_path / file).write_text(
                f'format = 1\nverbs = [{{ annotate = "head", key = "number", value = {number} }}]\n[end]\n'
            )
    if name == "tokenizer":
        asked["sets"] = [text for text in SMALL["sets"] if "tokenizer" not in text]
    return asked


@pytest.mark.parametrize("name", request.ASKED)
def test_an_option_survives_a_resume(name: str, observe: Observe, tmp_path: Path) -> None:
    asked = start_of(name, tmp_path)
    first = observe(*words(asked), "--out", "run")
    assert isinstance(first, dict), first
    without = {key: value for key, value in asked.items() if key != name} | (
        {"sets": SMALL["sets"]} if name == "sets" else {}
    )
    if name != "model":  # its default is the value that is given
        assert observe(*words(without), "--out", "plain") != first, "the option can be seen"
    assert observe("--resume", "--out", "run") == first
    assert observe("--resume", "--out", "run") == first, "and a second one"


@pytest.mark.parametrize("name", request.ASKED)
def test_an_option_given_on_resume_is_taken_or_refused_by_name(name: str, observe: Observe, tmp_path: Path) -> None:
    asked, other = start_of(name, tmp_path), VALUES[name][1]
    first = observe(*words(asked), "--out", "run")
    now = observe("--resume", "--out", "run", *words({name: other}))
    if isinstance(now, str):
        shown = {"sets": "dropout", "model": "bert", "seq": "seq"}.get(name, name)
        assert shown in now, now
        assert observe("--resume", "--out", "run") == first, "what was refused has changed nothing"
    else:
        assert now != first
        assert observe("--resume", "--out", "run") == now, "what was taken is kept in its turn"


@pytest.mark.parametrize("key", SET_TO)
def test_a_training_value_survives_a_resume_that_sets_another(key: str, observe: Observe) -> None:
    asked = {**SMALL, "sets": [*SMALL["sets"], f"{key}={SET_TO[key]}"]}
    first = observe(*words(asked), "--out", "run")
    assert isinstance(first, dict) and str(first["settings"][key]) == SET_TO[key]
    assert observe("--resume", "--out", "run") == first
    assert observe("--resume", "--out", "run", "--set", "width=16") == first, (
        "one that is repeated does not undo the others"
    )


def test_checkpoints_keep_coming_as_often(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = words({**SMALL, "steps": "4", "backend": "interpret", "save_every": "2"})
    assert call("train", *asked, "--out", "run", "--quiet").code == 0
    assert call("train", "--resume", "--out", "run", "--steps", "8", "--quiet").code == 0
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == [f"step-00000{n}" for n in (4, 6, 8)]
