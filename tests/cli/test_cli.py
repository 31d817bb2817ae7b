"""The command line: exit 0 on success, 1 when what it checks does not hold, 2 and one line on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.calls import SETUP, Call, program

from wholestep import cli
from wholestep.train import job as job_module


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return program(tmp_path, monkeypatch)


def test_verify_compares_and_prints_json(call: Call) -> None:
    done = call("verify", "own_training:setup", "--backend", "interpret", "--steps", "2", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["ok"] is True


def test_verify_tells_a_difference_by_its_exit_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.verify.report import Report, TensorRow

    monkeypatch.setattr(
        "wholestep.api.verify",
        lambda *a, **k: Report("whole step", "interpret", [TensorRow("0", "loss", "loss", 1.0, 0.1, False)]),
    )
    done = call("verify", "own_training:setup")
    assert done.code == 1 and "DIFFERS" in done.out


def test_verify_runs_the_awkward_batches_of_a_preset(call: Call) -> None:
    arguments = (
        "--backend",
        "interpret",
        "--steps",
        "1",
        "--batch",
        "2",
        "--seq",
        "8",
        "--set",
        "width=16",
        "--set",
        "layers=1",
    )
    done = call("verify", "gpt-1m", *arguments, "--set", "tokenizer=bytes", "--json")
    assert done.code == 0, done.err
    assert any(row["step"].startswith("edge") for row in json.loads(done.out)["rows"])


@pytest.mark.parametrize(("stage", "text"), [("captured", "# ---- forward ----"), ("lowered", "def step(inputs)")])
def test_show_prints_the_graph(call: Call, stage: str, text: str) -> None:
    done = call("show", "own_training:setup", "--stage", stage)
    assert done.code == 0 and text in done.out, done.err


def test_dump_and_disable_reach_the_passes(call: Call, tmp_path: Path) -> None:
    options = {"show": ("--stage", "prepared"), "verify": ("--backend", "interpret", "--steps", "1")}
    for command in ((name, "own_training:setup", *more) for name, more in options.items()):
        folder = tmp_path / command[0]
        done = call(*command, "--dump", str(folder))
        assert done.code == 0 and any("recognise_masks" in p.name for p in folder.iterdir()), done.err
        folder = tmp_path / f"{command[0]}-without"
        done = call(*command, "--dump", str(folder), "--disable", "recognise_masks")
        assert done.code == 0 and not any("recognise_masks" in p.name for p in folder.iterdir()), done.err


def test_doctor_names_versions_and_the_caches(call: Call) -> None:
    done = call("doctor")
    assert done.code == 0 and "torch" in done.out and "WHOLESTEP_CACHE_DIR" in done.out and "tokenizers" in done.out
    assert json.loads(call("doctor", "--json").out)["gpu"]


def test_doctor_says_how_to_get_what_is_missing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.compat.installed_version", lambda package: None)
    assert "pip install 'wholestep[hf]'" in call("doctor").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("verify gpt-1n", "gpt-1m"),
        ("train gpt-1n", "gpt-1m"),
        ("verify own_training:setpu", "did you mean own_training:setup?"),
        ("verify nowhere:setup", "No module named"),
        ("verify own_training:wrong", "(model, loss_fn, optimizer,"),
        ("verify own_training:no_scalar", "scalar"),
        ("train own_training:frozen", "require"),
        ("show own_training:setup --stage capture", "did you mean captured?"),
        ("verify own_training:setup --backend fast", "Use inductor or interpret"),
        ("verify own_training:setup --backend inducter", "did you mean inductor?"),
        ("train own_training:setup --disable recognize_masks", "did you mean recognise_masks?"),
        ("train own_training:setup --precision fp8", "--precision"),
        ("train own_training:setup --nonfinite ignore", "Use stop or skip or allow"),
        ("train own_training:setup --dump own_training.py/graphs", "--dump"),
        ("train own_training:setup --out own_training.py/run", "is not a folder"),
        ("train own_training:setup --out .", "holds files that are no run"),
        ("train --steps 0", "--steps"),
        ("train --batch 0", "--batch"),
        ("train --seq 0", "--seq"),
        ("train --save-every 0", "--save-every"),
        ("train --set lrr=1", "did you mean lr?"),
        ("train --set lr=fast", "lr"),
        ("train --set lr", "key=value"),
        ("train --data shakespear", "shakespeare"),
        ("train --data short.txt --set tokenizer=bytes", "fewer than one window"),
        ("train --memory 12GBs", "12GBs"),
        ("verify gpt-1m --memory 12GBs", "12GBs"),
        ("train --plan a.toml", "there is no plan"),
        ("train --recipe a.toml", "there is no recipe"),
        ("show gpt-1m --recipe own_training.py", "is no recipe"),
        ("plan gpt-1m --recipe wrong.toml", "did you mean recompute?"),
        ("verify gpt-1m --recipe elsewhere.toml", "line 1 of elsewhere.toml"),
        ("compare wrong.toml elsewhere.toml", "did you mean recompute?"),
        ("train --resume", "there is no run in runs/ to resume"),
        ("train gpt-1m --resume", "there is no run of gpt-1m in runs/"),
        ("train --resume --out nowhere", "nowhere does not exist"),
        ("train --resume --out .", "is not a run"),
        ("explain nowhere", "nowhere does not exist"),
        ("explain own_training.py", "not a run"),
        ("explain .", "is not a run"),
        ("tune gpt-1m", "`wholestep tune` is not part of this version"),
        ("trian", "trian"),
        ("train --stpes 3", "--stpes"),
        ("verify", "MODEL"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(call: Call, tmp_path: Path, arguments: str, said: str) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "wrong.toml").write_text('format = 1\nverbs = [{ recomptue = "blocks.*" }]\n[end]\n')
    (tmp_path / "elsewhere.toml").write_text('format = 1\nverbs = [{ recompute = "bloks.*" }]\n[end]\n')
    before = {path.name for path in tmp_path.iterdir()}
    done = call(*arguments.split())
    assert done.code == 2, done.out + done.err
    assert said in done.err and len(done.err.strip().splitlines()) == 1, done.err
    after = {path.name for path in tmp_path.iterdir()} - {"__pycache__", "runs"}
    assert after == before and not list(tmp_path.glob("runs/*")), "nothing is left behind"


@pytest.mark.parametrize(("name", "said"), [("raises", "the disk is on fire"), ("misfit", "(at own_training.py:")])
def test_an_error_of_the_users_own_code_is_told_with_its_place(call: Call, name: str, said: str) -> None:
    done = call("train", f"own_training:{name}", "--backend", "interpret", "--quiet")
    last = done.err.strip().splitlines()[-1]
    assert done.code == 2 and said in last and "Traceback" not in done.err, done.err


def test_an_error_of_our_own_keeps_its_traceback_in_a_file(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.cli import failure

    monkeypatch.setattr(failure, "_users_place", lambda error: None)
    monkeypatch.setattr("wholestep.cli.doctor.examine", lambda: 1 / 0)
    done = call("doctor")
    assert done.code == 2 and "ZeroDivisionError" in done.err and len(done.err.splitlines()) == 1
    path = Path(done.err.split("The traceback is in ")[1].split(";")[0])
    assert "Traceback" in path.read_text()
    path.unlink()


COMMANDS = ("", "train", "verify", "show", "explain", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_has_examples(call: Call, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = call(*command.split(), "--help")
    assert done.code == 0 and f"  wholestep {command}" in done.out and "Examples:" in done.out
    assert max(map(len, done.out.splitlines())) <= 80


def test_help_is_quick_because_it_imports_no_torch() -> None:
    check = "import sys; import wholestep.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_ctrl_c_before_the_loop_is_one_line_and_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_module, "make_job", stop)
    done = call("train")
    assert done.code == 130 and len(done.err.strip().splitlines()) == 1 and "Traceback" not in done.err


@pytest.mark.slow
def test_a_reader_that_went_away_is_no_error(in_folder: Path) -> None:
    command = f"{sys.executable} -m wholestep show own_training:setup | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=in_folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_our_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from wholestep.errors import WholestepWarning

    cli._show_warning("sizes stay static", WholestepWarning, "step.py", 3)
    assert capsys.readouterr().err == "wholestep: note: sizes stay static\n"


def test_the_program_of_these_tests_is_a_program() -> None:
    compile(SETUP, "own_training.py", "exec")
