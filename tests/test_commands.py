"""wholestep.train, wholestep.plan, wholestep.profile: names and objects in, results that print and show themselves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.train.metrics import read_rows
from wholestep.train.running import Run

SMALL: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "tokenizer": "bytes"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def own() -> tuple[Any, ...]:
    """A model, a loss, an optimizer and a batch, the same every time."""
    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(16, 8), "y": torch.randn(16, 1)}
    loss = lambda model, b: nn.functional.mse_loss(model(b["x"]), b["y"])  # noqa: E731
    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch


def eager_losses(steps: int, clip_norm: float | None = None) -> list[float]:
    model, loss_fn, optimizer, batch = own()
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def test_training_objects_is_the_loop_it_replaces_and_resumes(tmp_path: Path) -> None:
    outcome = wholestep.train(*own(), steps=3, clip_norm=0.1, backend="interpret", out=tmp_path / "run", quiet=True)
    assert losses(outcome.folder) == pytest.approx(eager_losses(3, 0.1), rel=1e-6)
    outcome = wholestep.train(
        *own(), steps=5, clip_norm=0.1, backend="interpret", out=tmp_path / "run", resume=True, quiet=True
    )
    assert losses(outcome.folder) == pytest.approx(eager_losses(5, 0.1), rel=1e-6)
    assert (tmp_path / "run" / "loss.svg").exists()


def test_a_run_by_name_can_be_resumed_from_python_and_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "_sample", lambda run: None)  # not what is looked at here, and most of the time
    first = wholestep.train("gpt-1m", settings=SMALL, batch=2, seq=16, steps=2, backend="interpret", log=["csv"])
    out = capsys.readouterr().out
    assert "step 2/2" in out and (first.folder / "metrics.csv").exists()
    on = wholestep.train(out=first.folder, resume=True, steps=4, quiet=True)
    again = wholestep.train(config=first.folder / "run.toml", out="again", quiet=True)
    assert not capsys.readouterr().out
    assert on.steps == again.steps == 4 and losses(on.folder) == losses(again.folder)


def test_results_print_as_the_command_does_and_show_pictures(tmp_path: Path) -> None:
    fit = wholestep.plan(*own(), device="24GiB")
    outcome = wholestep.train(*own(), steps=2, backend="interpret", out=tmp_path / "run", quiet=True)
    profile = wholestep.profile(*own(), backend="interpret", steps=2, verified=False)
    for result, first in ((fit, "Net, fp32: fits"), (outcome, "trained   Net: 2 steps"), (profile, "Net: ")):
        assert str(result).startswith(first) and len(str(result).splitlines()) > 2
        assert "\n" not in repr(result) and repr(result).startswith("<")
    assert "<svg" in fit._repr_html_() and "<svg" in outcome._repr_html_() and "<iframe" in profile._repr_html_()
    assert " ms" not in str(fit), "the speed of a card of 24 GiB is not known"
    assert profile.write(tmp_path / "page.html").exists() and fit.to_json()["fits"]


def test_a_plan_goes_to_compile() -> None:
    model, loss_fn, optimizer, batch = own()
    fit = wholestep.plan(model, loss_fn, optimizer, batch, device="h200")
    assert optimizer.state == {} and fit.fits
    step = wholestep.compile(model, loss_fn, optimizer, batch, plan=fit.plan, backend="interpret")
    assert float(step(batch)) == pytest.approx(eager_losses(1)[0], rel=1e-6)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: wholestep.plan(Net()), "without a batch"),
        (lambda: wholestep.plan(*own()[:2], None, {"x": torch.ones(1)}), "an optimizer of torch.optim"),
        (lambda: wholestep.plan("gpt-1m", optimizer=own()[2]), "leave it out"),
        (lambda: wholestep.plan("gpt-1m", clip_norm=1.0), "settings={'clip_norm'"),
        (lambda: wholestep.plan("gpt-1m", memory="200GiB"), "has 140 GiB"),
        (lambda: wholestep.plan("gpt-1m", device="h2000"), "h200"),
        (lambda: wholestep.plan(*own(), batch=3), "your own objects"),
        (lambda: wholestep.train("gpt-1", quiet=True), "did you mean gpt-1m?"),
        (lambda: wholestep.train("gpt-1m", settings={"lrr": 1}, quiet=True), "did you mean lr?"),
        (lambda: wholestep.train(*own(), log=["cvs"], quiet=True), "did you mean csv?"),
        (lambda: wholestep.train("gpt-1m", memory="1GiB", plan="p.toml", quiet=True), "give one of them"),
        (lambda: wholestep.train(*own(), data="shakespeare", quiet=True), "your own objects"),
        (lambda: wholestep.profile(*own(), system="egaer"), "use wholestep, eager, compile"),
        (lambda: wholestep.profile(*own(), steps=0), "steps=0"),
        (lambda: wholestep.train(*own(), steps=0, quiet=True), "steps=0"),
        (lambda: wholestep.train(*own(), log="cvs", quiet=True), "did you mean csv?"),  # type: ignore[arg-type]
        (lambda: wholestep.train("gpt-1m", settings=["lr"], quiet=True), "settings=['lr']"),  # type: ignore[arg-type]
        (lambda: wholestep.plan(*own(), device=3), "device=3"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_one_line(call: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadOption) as raised:
        call()
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_wrong_batch_is_one_line_that_names_the_difference() -> None:
    model, loss_fn, optimizer, batch = own()
    step = wholestep.compile(model, loss_fn, optimizer, batch, backend="interpret")
    step(batch)
    wrong = {
        r"'x' is float32\[16, 7\] and was float32\[16, 8\]": {**batch, "x": torch.randn(16, 7)},
        r"'x' is float64\[16, 8\] and was float32\[16, 8\]": {**batch, "x": batch["x"].double()},
        r"'y' is float32\[5, 1\] and was float32\[16, 1\]": {**batch, "y": batch["y"][:5]},
        r"the batch lacks 'y'": {"x": batch["x"]},
    }
    for said, one in wrong.items():
        with pytest.raises(wholestep.WholestepError, match=said) as raised:
            step(one)
        assert "\n" not in str(raised.value) and raised.value.__suppress_context__
        assert "test_commands.py:" in str(raised.value), "with the user's own line"
    assert step.count == 1
    assert float(step(batch)) == pytest.approx(eager_losses(2)[1], rel=1e-6)


@pytest.mark.parametrize("kind", [AttributeError, KeyError, ValueError, RuntimeError])
def test_a_broken_forward_raises_the_users_own_error(kind: type[Exception]) -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind is AttributeError:
                return self.third(x)
            if kind is RuntimeError:
                return self.first(x[:, :3])
            raise kind("mine")

    model = Broken()
    _, loss_fn, _, batch = own()
    with pytest.raises(kind) as raised:
        wholestep.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch, backend="interpret")(
            batch
        )
    assert not isinstance(raised.value, wholestep.WholestepError) and raised.value.__cause__ is None


def test_public_names_are_functions_whatever_was_imported_before() -> None:
    check = (
        "import time; began = time.process_time()\n"
        "import sys, wholestep\n"
        "assert 'torch' not in sys.modules and time.process_time() - began < 2\n"
        "assert {'plan', 'profile', 'train', 'compile', 'verify', 'nn', 'hf'} <= set(dir(wholestep))\n"
        "import wholestep.plan.budget, wholestep.profile.profile, wholestep.train.loop, wholestep.verify.report\n"
        "from wholestep.schedule import recipes\n"
        "names = ('plan', 'profile', 'train', 'verify', 'schedule', 'compile')\n"
        "assert all(type(getattr(wholestep, name)).__name__ == 'function' for name in names)\n"
        "assert all(hasattr(wholestep, name) for name in dir(wholestep))\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
