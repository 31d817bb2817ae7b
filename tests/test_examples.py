"""Every example runs as a user runs it, and does what it says: one in a process of its own, the others in one that is warm."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
NUMBER = r"(-?\d+\.\d+)"


def run(*command: str) -> str:
    """What a Python process prints; it must end with exit code 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default::UserWarning"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def example(name: str, steps: int, *more: str, process: bool = False) -> str:
    """What an example prints. In this process half of the time, loading torch and Dynamo, is saved."""
    words = [str(FOLDER / name), "--steps", str(steps), "--backend", "interpret", *more]
    if process:
        return run(*words)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(sys, "argv", words)
        patch.chdir(ROOT)
        code = importlib.import_module(Path(name).stem).main()
    assert code == 0, printed.getvalue()[-3000:]
    return printed.getvalue()


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that a line of the output holds."""
    found = re.search(pattern.replace("NUMBER", NUMBER), text)
    assert found is not None, f"no {pattern!r} in\n{text}"
    return [float(group) for group in found.groups()]


def test_plain_loop_has_the_losses_of_the_loop_it_replaces() -> None:
    said = example("plain_loop.py", 40, process=True)
    before, after = numbers(r"train_wholestep +loss NUMBER -> NUMBER", said)
    assert [before, after] == numbers(r"train_eager +loss NUMBER -> NUMBER", said) and after < 0.8 * before
    assert "the same losses bit for bit" in said
    assert re.search(r"^ *-.*loss\.backward\(\)", said, re.MULTILINE) and "+        loss = step(batch)" in said


def test_hf_trainer_learns_and_resumes_exactly() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = example("hf_trainer.py", 20)
    before, after = numbers(r"accuracy NUMBER -> NUMBER after", said)
    assert before < 0.7 and after > 0.9
    assert "whole step" in said and "resumed from checkpoint-10" in said and "differ by 0.0e+00" in said


def test_fabric_trains_and_resumes_exactly() -> None:
    try:
        import lightning.fabric  # noqa: F401
    except ImportError:
        pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")
    said = example("fabric.py", 40)
    before, after = numbers(r"NUMBER -> NUMBER after 40 steps \(whole step\)", said)
    assert after < before / 2
    assert "resumed at step 20" in said and "differ by 0.0e+00" in said


def test_fabric_missing_is_one_line_that_says_how_to_get_it() -> None:
    absent = "import sys, runpy; sys.modules.update({'lightning': None, 'lightning_fabric': None}); "
    said = run(
        "-c", absent + f"sys.argv = ['fabric.py']; runpy.run_path({str(FOLDER / 'fabric.py')!r}, run_name='__main__')"
    )
    assert said.strip() == "this example needs Lightning Fabric: pip install lightning-fabric"


def test_relational_attention_has_the_losses_of_plain_pytorch() -> None:
    said = example("relational_attention.py", 4, "--scale", "0.03")
    before, after = numbers(r"loss NUMBER -> NUMBER \(whole step\)", said)
    assert after < before and numbers(r"ms: NUMBER times faster", said)[0] > 0
    model = (FOLDER / "relational_attention.py").read_text().split("def message")[1].split("def timed")[0]
    assert len(model.splitlines()) <= 30


def test_gan_moves_towards_the_data() -> None:
    said = example("gan.py", 60)
    before, after = numbers(r"distance of made points to the data: NUMBER -> NUMBER", said)
    assert after < before - 0.3
    assert "whole step of the critic, whole step of the generator" in said


def test_lora_trains_and_saves_the_adapters_alone() -> None:
    said = example("lora.py", 30)
    before, after = numbers(r"adapters: loss NUMBER -> NUMBER", said)
    assert after < before
    assert "the base is unchanged: True" in said and "computes the same: True" in said
    size = re.search(r"saved (\d+) KiB", said)
    assert size is not None and 0 < int(size.group(1)) < 40


def test_resnet_knows_digits_it_was_not_trained_on() -> None:
    said = example("resnet.py", 60)
    before, after = numbers(r"held-out accuracy NUMBER -> NUMBER", said)
    assert before < 0.3 and after > 0.8
    assert "1 capture(s)" in said  # evaluation in between leaves the step alone


@pytest.mark.slow
def test_every_liar_is_named() -> None:
    said = example("find_the_liar.py", 1, process=True)
    culprits = {
        "gelu_gradient_with_published_sign": "up",
        "shard_embedding_masking_twice": "tokens",
        "recompute_dropout_with_new_bits": "down",
        "drop_collectives": "head",
    }
    for rewrite, module in culprits.items():
        assert re.search(rf" caught +{rewrite} +{module} ", said), f"{rewrite} is not named in\n{said}"
    assert "4 of 4 liars found, every honest rewrite cleared" in said


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The demo as a module, without its two processes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import find_the_liar

    monkeypatch.setattr(find_the_liar.torch.distributed, "is_gloo_available", lambda: False)
    return find_the_liar


def test_a_liar_that_escapes_is_an_exit_code(
    liar: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tame = liar.Case("no bug at all", "nowhere", liar.HONEST[2], liar.HONEST[2])
    monkeypatch.setattr(liar, "CASES", (tame,))
    assert liar.main(["--steps", "1"]) == 1
    said = capsys.readouterr().out
    assert "escaped" in said and "not as it should be: no bug at all" in said


def test_an_honest_rewrite_that_is_accused_is_an_exit_code(
    liar: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = liar.CASES[2]
    monkeypatch.setattr(liar, "CASES", (case,))
    monkeypatch.setattr(liar, "HONEST", (case.lying,))
    assert liar.main(["--steps", "1"]) == 1
    assert "honest accused" in capsys.readouterr().out


def test_every_example_is_listed_and_tested() -> None:
    names = {path.name for path in FOLDER.glob("*.py")}
    listed = set(re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text("utf-8")))
    tested = set(re.findall(r"example\(\"(\w+\.py)\"", Path(__file__).read_text("utf-8")))
    assert names == listed == tested
