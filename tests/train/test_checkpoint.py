"""Checkpoints: what comes back is what was saved, whatever moment the run was killed at, and misfits are named."""

from __future__ import annotations

import errno
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.forked import run_in_fork
from torch import nn

import wholestep
from wholestep.errors import BadCheckpoint, BadOption, WholestepWarning
from wholestep.train import checkpoint, checkpoint_files, encoding
from wholestep.train.checkpoint import model_tensors
from wholestep.train.checkpoint_files import save_tensors
from wholestep.train.checkpoint_hashes import write_hashes

SCHEDULE_WARNING = "ignore:Detected call of `lr_scheduler.step:UserWarning"
pytestmark = pytest.mark.filterwarnings(SCHEDULE_WARNING)


class Tied(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.embed(ids))))


def build(kind: str, seed: int) -> tuple[Any, ...]:
    """(model, optimizer, scheduler, step), fresh; `seed` differs between the runs so that nothing agrees by luck."""
    torch.manual_seed(seed)
    if kind == "tied":
        model: nn.Module = Tied()
    elif kind == "batchnorm":
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    else:
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    if kind == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.2)
        scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)
    plan = wholestep.Plan(state={"*": "host"}) if kind == "away" else None
    options: dict[str, Any] = dict(backend="interpret", check="off", verbose=False, plan=plan)
    step = wholestep.compile(model, loss, optimizer, batch(kind, 0), **options)
    return model, optimizer, scheduler, step


def loss(model: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
    if "ids" in b:
        return nn.functional.cross_entropy(model(b["ids"]).flatten(0, 1), b["ids"].flatten())
    return nn.functional.mse_loss(model(b["x"]), b["y"])


def batch(kind: str, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    if kind == "tied":
        return {"ids": torch.randint(0, 11, (3, 4), generator=generator)}
    return {"x": torch.randn(6, 5, generator=generator), "y": torch.randn(6, 1, generator=generator)}


def run(kind: str, built: tuple[Any, ...], first: int, last: int) -> list[torch.Tensor]:
    """Losses of the steps, and the global generators' numbers, which a loop's data order would come from."""
    _, _, scheduler, step = built
    seen = []
    for number in range(first, last):
        value = step(batch(kind, number)).detach().clone()
        scheduler.step()
        seen += [value, torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.standard_normal())]
    return seen


def everything(built: tuple[Any, ...]) -> dict[str, Any]:
    model, optimizer, scheduler, step = built
    tensors: dict[str, torch.Tensor] = {}
    facts = encoding.encode(optimizer.state_dict(), "optimizer", tensors)
    return {
        **model.state_dict(),
        **tensors,
        "facts": facts,
        "scheduler": scheduler.state_dict(),
        "step": step.state_dict(),
    }


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, also between NaNs."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def save_small(folder: Path, number: int = 1, **more: Any) -> Path:
    return wholestep.save(folder, model=nn.Linear(2, 3), step=number, **more)


# ---- exact resume ----


@pytest.mark.parametrize("kind", ["dropout", "sgd", "batchnorm", "tied"])
def test_resuming_is_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole = build(kind, 0)
    expected = run(kind, whole, 0, 10)
    random.seed(0), np.random.seed(0)  # as the test began; `build` seeds torch
    first = build(kind, 0)
    half = run(kind, first, 0, 5)
    model, optimizer, scheduler, step = first
    path = wholestep.save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, step=step, data={"epoch": 2})
    assert path == tmp_path / "step-000005"
    second = build(kind, 7)
    run(kind, second, 0, 2)
    model, optimizer, scheduler, step = second
    loaded = wholestep.load(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler, step=step)
    assert (loaded.number, loaded.data, loaded.path) == (5, {"epoch": 2}, path)
    assert equal(half + run(kind, second, 5, 10), expected)
    assert equal(everything(second), everything(whole))


RESUME = """
import sys, torch, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import test_checkpoint as t
import wholestep
built = t.build("dropout", 3)
model, optimizer, scheduler, step = built
wholestep.load(sys.argv[2], model=model, optimizer=optimizer, scheduler=scheduler, step=step)
t.run("dropout", built, 5, 10)
wholestep.save(sys.argv[2], model=model, optimizer=optimizer, scheduler=scheduler, step=step)
"""


def test_resuming_in_another_process_is_bit_for_bit(tmp_path: Path) -> None:
    first = build("dropout", 0)
    run("dropout", first, 0, 5)
    names = ("model", "optimizer", "scheduler", "step")
    wholestep.save(tmp_path, **dict(zip(names, first)))
    run("dropout", first, 5, 10)
    assert run_in_fork(RESUME, str(Path(__file__).parent), str(tmp_path)) == ""
    there = build("dropout", 9)
    assert wholestep.load(tmp_path, **dict(zip(names, there))).number == 10
    assert equal(everything(there), everything(first))


def test_a_momentum_buffer_not_used_yet_is_not_saved(tmp_path: Path) -> None:
    """Wholestep makes the buffers before the first step; torch's first step, without one, takes no dampening."""
    whole, resumed = build("sgd", 0), build("sgd", 1)
    whole[3]._latest.binding.refresh()
    assert all(hasattr(entry["momentum_buffer"], checkpoint.UNUSED) for entry in whole[1].state.values())  # the premise
    wholestep.save(tmp_path, **dict(zip(("model", "optimizer", "scheduler", "step"), whole)))
    expected = run("sgd", whole, 0, 3)
    wholestep.load(tmp_path, **dict(zip(("model", "optimizer", "scheduler", "step"), resumed)))
    assert equal(run("sgd", resumed, 0, 3), expected)


# ---- what is stored ----


class EveryKind(nn.Module):
    """Buffers of every dtype, of no element, of no dimension, not contiguous, and views of one storage."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(fill)
        for i, dtype in enumerate(getattr(torch, name) for name in sorted(encoding.DTYPES)):
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (4, dtype.itemsize), generator=generator)
            self.register_buffer(f"b{i}", raw.to(torch.uint8).view(dtype).reshape(4))
        base = torch.randn(4, 6, generator=generator)
        self.register_buffer("scalar", torch.tensor(fill))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("transposed", base.t())
        self.register_buffer("row", base[1])
        self.register_buffer("flat", base.view(-1))
        self.register_buffer("nan", torch.tensor([float("nan"), -0.0, float("inf")]))


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved, other = EveryKind(1), EveryKind(2)
    before = {name: value.clone() for name, value in saved.state_dict().items()}
    wholestep.save(tmp_path, model=saved)
    loaded = wholestep.load(tmp_path, model=other.to(torch.device("cpu")))
    # Overlapping buffers of `other` are written one after another; the last of them wins in all of them, as in `saved`.
    assert equal(dict(other.state_dict()), before) and loaded.number == 0


def test_tied_tensors_are_stored_once_and_load_strictly(tmp_path: Path) -> None:
    model = {"a": Tied(), "b": nn.Linear(2, 2)}
    path = wholestep.save(tmp_path, model=model)
    tensors, metadata = checkpoint_files.read_tensors(path / "model.safetensors")
    assert json.loads(metadata["aliases"]) == {"a.head.weight": "a.embed.weight"}
    assert "a.head.weight" not in tensors and "b.weight" in tensors
    fresh = {"a": Tied(), "b": nn.Linear(2, 2)}
    wholestep.load(tmp_path, model=fresh)
    assert all(equal(dict(fresh[k].state_dict()), dict(model[k].state_dict())) for k in model)
    assert fresh["a"].head.weight is fresh["a"].embed.weight


def test_equal_states_are_equal_bytes(tmp_path: Path) -> None:
    """safetensors writes its metadata in another order each time: sha256sum would tell equal runs apart."""
    model = {"a": Tied(), "b": nn.Linear(2, 2)}
    files = [wholestep.save(tmp_path / str(i), model=model) / "model.safetensors" for i in range(12)]
    assert len({file.read_bytes() for file in files}) == 1


def test_optimizer_state_of_other_dtypes_and_strides_is_exact(tmp_path: Path) -> None:
    def make(fill: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Conv2d(3, 4, 3, bias=False).to(torch.bfloat16).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD([{"params": [model.weight], "lr": torch.tensor(0.1)}], lr=0.1, momentum=0.9)
        momentum = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last) + fill
        optimizer.state[model.weight] = {
            "momentum_buffer": momentum, "mask": torch.arange(3), "list": [torch.ones(1), (2, None)], "count": 3,
        }  # fmt: skip
        return model, optimizer

    (model, optimizer), (other, fresh) = make(0.0), make(1.0)
    wholestep.save(tmp_path, model=model, optimizer=optimizer)
    wholestep.load(tmp_path, model=other, optimizer=fresh)
    state, expected = fresh.state[other.weight], optimizer.state[model.weight]
    assert equal(state["momentum_buffer"], expected["momentum_buffer"]) and equal(state["mask"], expected["mask"])
    assert state["momentum_buffer"].stride() == expected["momentum_buffer"].stride()
    assert (
        state["count"] == 3 and state["list"][1] == (2, None) and equal(fresh.param_groups[0]["lr"], torch.tensor(0.1))
    )


def test_an_optimizer_that_has_no_state_yet(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    wholestep.save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
    fresh = torch.optim.SGD(model.parameters(), lr=1.0)
    wholestep.load(tmp_path, model=model, optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.25 and not fresh.state


def test_a_shared_step_counter_is_saved_as_separate_tensors(tmp_path: Path) -> None:
    built = build("dropout", 0)
    run("dropout", built, 0, 2)
    model, optimizer, *_ = built
    bases = {id(entry["step"]._base) for entry in optimizer.state.values()}
    assert len(bases) == 1  # the premise
    wholestep.save(tmp_path, model=model, optimizer=optimizer)
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    wholestep.load(tmp_path, model=model, optimizer=plain)
    assert [float(entry["step"]) for entry in plain.state.values()] == [2.0] * 4
    assert all(entry["step"]._base is None for entry in plain.state.values())


def test_state_of_the_host_does_not_pass_through_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be more than the card has room for: only step counts are given to the optimizer, which would put all of it there."""
    built = build("away", 0)
    run("away", built, 0, 2)
    model, optimizer, _, step = built
    wholestep.save(tmp_path, model=model, optimizer=optimizer, step=step)
    expected = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    model, fresh, _, step = build("away", 1)
    seen: list[torch.Tensor] = []
    given = fresh.load_state_dict

    def load(state: dict[str, Any]) -> None:
        seen.extend(value for entry in state["state"].values() for value in entry.values())
        given(state)

    monkeypatch.setattr(fresh, "load_state_dict", load)
    wholestep.load(tmp_path, model=model, optimizer=fresh, step=step)
    assert seen and not any(value.dim() for value in seen)
    assert equal([entry["exp_avg"] for entry in fresh.state.values()], expected)


def test_files_are_those_of_safetensors_and_nothing_is_copied_before_it_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2).bfloat16(), nn.Linear(2, 5).double())
    model.register_buffer("empty", torch.zeros(0, 4))
    model.register_buffer("number", torch.tensor(7))
    model.register_buffer("turned", torch.randn(4, 3).t())
    model.register_buffer("flags", torch.tensor([True, False, True]))
    tensors, _ = model_tensors(model)
    state = model.state_dict()
    assert all(tensors[name].data_ptr() == value.data_ptr() for name, value in state.items())
    save_tensors(tensors, tmp_path / "x.safetensors", {"format": "pt", "aliases": "{}"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], value) and found[n].dtype == value.dtype for n, value in state.items())


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    data = {
        "a": [1, 2.5, None, True],
        3: ("x", float("inf")),
        "$": 1,
        "c": Counter({4: 2}),
        "tiny": 5e-324,
        "big": 2**80,
    }
    save_small(tmp_path, data=data, config=[0.1 + 0.2])
    loaded = wholestep.load(tmp_path, model=nn.Linear(2, 3))
    assert equal(loaded.data, data) and loaded.config == [0.1 + 0.2]


def test_no_pickle_is_written_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle")

    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    for name in ("dumps", "dump", "loads", "load"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    path = save_small(tmp_path)
    wholestep.load(tmp_path, model=nn.Linear(2, 3))
    assert sorted(p.name for p in path.iterdir()) == [
        "checkpoint.json", "checkpoint.sha256", "model.safetensors", "rng.safetensors"
    ]  # fmt: skip


# ---- the folder ----


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 1_000_000, 3_000_000):
        save_small(tmp_path, number, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-3000000"]
    assert wholestep.load(tmp_path, model=nn.Linear(2, 3)).number == 3_000_000
    assert wholestep.load(tmp_path / "step-1000000", model=nn.Linear(2, 3)).number == 1_000_000
    assert save_small(tmp_path, None).name == "step-3000001"


def test_a_lower_number_is_saved_and_said(tmp_path: Path) -> None:
    for number in (8, 9):
        save_small(tmp_path, number)
    with pytest.warns(WholestepWarning, match="step 4 is saved beside step-000009"):
        path = save_small(tmp_path, 4, keep=1)
    assert path.exists() and (tmp_path / "step-000009").exists() and not (tmp_path / "step-000008").exists()


def test_saving_a_number_again_replaces_it(tmp_path: Path) -> None:
    save_small(tmp_path, data="old")
    save_small(tmp_path, data="new")
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert wholestep.load(tmp_path, model=nn.Linear(2, 3)).data == "new"


def test_a_replacement_cut_short_is_found_and_finished(tmp_path: Path) -> None:
    path = save_small(tmp_path, data="old")
    path.rename(path.with_name(path.name + ".replaced"))
    assert wholestep.load(tmp_path, model=nn.Linear(2, 3)).data == "old"
    save_small(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_what_a_killed_run_left_is_ignored_then_removed(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    for name in (".saving-step-000009-abc", ".removing-step-000000-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert wholestep.load(tmp_path, model=nn.Linear(2, 3)).number == 1
    save_small(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000001", "step-000002"]


KILL_WHILE_SAVING = """
import os, random, signal, sys, time, warnings
import torch, wholestep
import wholestep.train.checkpoint
torch.set_num_threads(1)  # no pool of threads exists when a child is forked
folder, times = sys.argv[1], int(sys.argv[2])

def save_in_a_loop(number, told):
    model = torch.nn.Linear(200, 200)
    while True:
        number += 1
        with torch.no_grad():
            model.weight.fill_(number), model.bias.fill_(number)
        wholestep.save(folder, model=model, step=number - number % 2, data=number, keep=2)  # every other one replaces
        os.write(told, b"%d " % number)

chance, number, unfinished = random.Random(5), 0, 0
for _ in range(times):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_in_a_loop(number, writer)
    os.close(writer)
    text = os.read(reader, 100)
    time.sleep(chance.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 10_000):
        text += more
    os.close(reader)
    told = int(text.split()[-1])
    unfinished += sum(name.startswith(".") or name.endswith(".replaced") for name in os.listdir(folder))
    model = torch.nn.Linear(200, 200)
    warnings.simplefilter("error")  # a damaged checkpoint would be told
    number = wholestep.load(folder, model=model).data
    assert told <= number <= told + 1, (told, number)
    assert bool((model.weight == number).all()) and bool((model.bias == number).all())
print("unfinished", unfinished)
"""


def kill_while_saving(folder: Path, times: int) -> None:
    """Children save in a loop and are killed at random moments; what is loaded is the last they told of, or the next."""
    found = re.fullmatch(r"unfinished (\d+)\n", said := run_in_fork(KILL_WHILE_SAVING, str(folder), str(times)))
    assert found, said
    if times >= 30:  # enough that some were killed amid a save: the test does test something
        assert int(found[1]) > 0


def test_killed_at_any_moment(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 5)


@pytest.mark.slow
def test_killed_at_many_moments(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 30)


# ---- errors ----


def test_no_folder_no_checkpoint_foreign_folder(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(BadCheckpoint, match=r"there is no folder .*absent"):
        wholestep.load(tmp_path / "absent", model=model)
    with pytest.raises(BadCheckpoint, match="holds no checkpoint"):
        wholestep.load(tmp_path, model=model)
    (tmp_path / "checkpoint.json").write_text('{"epoch": 3}')
    with pytest.raises(BadCheckpoint, match=r"was not written by wholestep\.save"):
        wholestep.load(tmp_path, model=model)


@pytest.mark.parametrize("name", ["model.safetensors", "rng.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("harm", ["truncated", "missing", "overwritten"])
def test_a_damaged_checkpoint_written_without_hashes(name: str, harm: str, tmp_path: Path) -> None:
    """Sizes and headers are compared all the same."""
    save_small(tmp_path, 1)
    path = save_small(tmp_path, 2) / name
    without_hashes(path.parent)
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if harm == "truncated" else b"\xff" * len(content))
    why = " has .* bytes instead of " if harm == "truncated" and name != "checkpoint.json" else ""
    for asked in (tmp_path, path.parent):
        with pytest.raises(
            BadCheckpoint, match=f"step-000002 is damaged: {name}{why}.*step-000001 is good: take it with `load"
        ):
            wholestep.load(asked, model=nn.Linear(2, 3))
    assert wholestep.load(tmp_path / "step-000001", model=nn.Linear(2, 3)).number == 1
    (tmp_path / "step-000001" / "checkpoint.json").unlink()
    with pytest.raises(BadCheckpoint, match="no other checkpoint beside it is good"):
        wholestep.load(tmp_path, model=nn.Linear(2, 3))


def without_hashes(path: Path) -> None:
    """As an older Wholestep wrote it."""
    (path / "checkpoint.sha256").unlink()
    facts = json.loads((path / "checkpoint.json").read_text())
    del facts["hashes"]
    (path / "checkpoint.json").write_text(json.dumps(facts))


def test_an_old_checkpoint_without_hashes_is_loaded_and_said(tmp_path: Path) -> None:
    path = save_small(tmp_path, 2, data="mine")
    without_hashes(path)
    with pytest.warns(WholestepWarning) as told:
        assert wholestep.load(tmp_path, model=nn.Linear(2, 3)).data == "mine"
    assert [str(warning.message) for warning in told] == [
        f"{path} was saved without hashes, by an older Wholestep: bytes that changed in it since would not be noticed"
    ]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    path = save_small(tmp_path, 2) / "checkpoint.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 99'))
    write_hashes(path.parent, [p.name for p in path.parent.iterdir() if p.name != "checkpoint.sha256"])
    with pytest.raises(BadCheckpoint, match=r"format version 99, this Wholestep reads up to 1\. update Wholestep"):
        wholestep.load(tmp_path, model=nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Linear(2, 4), r"'weight' is \(3, 2\) in the checkpoint, \(4, 2\) in the model \(and 1 more\)"),
        (nn.Linear(2, 3, bias=False), r"the checkpoint has 'bias' \(3,\), the model has not"),
        (nn.Sequential(nn.Linear(2, 3)), r"the model has '0.weight' \(3, 2\), the checkpoint has not \(and 1 more\)"),
    ],
)
def test_a_model_that_does_not_fit_is_named_and_left_alone(model: nn.Module, text: str, tmp_path: Path) -> None:
    save_small(tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(BadCheckpoint, match=text):
        wholestep.load(tmp_path, model=model)
    assert equal(dict(model.state_dict()), before)


def test_parts_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    saved, model = nn.Linear(2, 3), nn.Linear(2, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wholestep.save(tmp_path / "without", model=saved)
    wholestep.save(tmp_path / "with", model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.1))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(BadCheckpoint, match="was saved without optimizer="):
        wholestep.load(tmp_path / "without", model=model, optimizer=optimizer)
    with pytest.raises(BadCheckpoint, match=r"parameters per group are \[2\] in the checkpoint, \[1\] here"):
        wholestep.load(tmp_path / "with", model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(BadCheckpoint, match="was saved without scheduler="):
        wholestep.load(tmp_path / "with", model=model, scheduler=scheduler)
    assert equal(dict(model.state_dict()), before)


def test_another_dtype_is_converted_and_said(tmp_path: Path) -> None:
    save_small(tmp_path)
    with pytest.warns(WholestepWarning, match="weight from torch.float32 to torch.bfloat16"):
        wholestep.load(tmp_path, model=nn.Linear(2, 3, dtype=torch.bfloat16))


def test_a_step_given_for_a_checkpoint_without_one(tmp_path: Path) -> None:
    model, *_, step = build("dropout", 0)
    wholestep.save(tmp_path, model=model, step=40)
    with pytest.warns(WholestepWarning, match="saved without a Step"):
        wholestep.load(tmp_path, model=model, step=step)
    assert step.count == 40


class WithExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class OddScheduler:
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": 3, "history": [{"when": np.int64(3)}]}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"model": WithExtra(1, 1)}, "'_extra_state' of model.state_dict.. is a dict, not a tensor"),
        ({"scheduler": OddScheduler()}, r"scheduler\['history'\]\[0\]\['when'\] is a numpy.int64"),
        ({"data": {"order": torch.arange(3)}}, r"data\['order'\] is a torch.Tensor"),
        ({"config": object()}, "config is a builtins.object"),
        ({"model": [3]}, "model holds a int"),
        ({"model": nn.Linear(2, 2, device="meta")}, "'weight' is a tensor without data"),
        ({"model": nn.Linear(2, 2, dtype=torch.complex128)}, "'weight' is a tensor of torch.complex128"),
    ],
)
def test_what_cannot_be_saved_is_named(arguments: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=text):
        wholestep.save(tmp_path / "new", **{"model": nn.Linear(1, 1), **arguments})
    assert not (tmp_path / "new").exists()


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="keep=0"):
        save_small(tmp_path, keep=0)
    with pytest.raises(BadOption, match="step=-1"):
        save_small(tmp_path, -1)


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_a_full_disk_keeps_the_last_checkpoint(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path, 1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(BadCheckpoint) as caught:
            save_small(tmp_path, 2, keep=1)
    assert "No space left on device. step-000001 is complete and kept." in str(caught.value) and "\n" not in str(
        caught.value
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert wholestep.load(tmp_path, model=nn.Linear(2, 3)).number == 1


SAVE_TOO_MUCH = """
import resource, sys, torch, wholestep
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    wholestep.save(sys.argv[1], model=torch.nn.Linear(100, 100), step=2)
except wholestep.WholestepError as error:
    print(error)
"""


def test_a_disk_that_refuses_the_tensors_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """A true refusal, inside safetensors' own writer, which reports it by another exception than OSError."""
    save_small(tmp_path, 1)
    said = run_in_fork(SAVE_TOO_MUCH, str(tmp_path))
    assert "could not be written" in said and "File too large" in said, said
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_no_permission_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", forbid)
    with pytest.raises(
        BadCheckpoint, match=r"could not be written to .*: Permission denied\. there is no earlier checkpoint"
    ):
        save_small(tmp_path / "closed")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_closed_for_writing(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadCheckpoint, match="Permission denied"):
        save_small(tmp_path)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"step": "3"}, "step='3'"), ({"step": -1}, "step=-1"), ({"keep": "3"}, "keep='3'"),
        ({"optimizer": "adam"}, "optimizer='adam'. give the Optimizer itself"), ({"scheduler": 3}, "scheduler=3"),
        ({"files": {"a": "text"}}, "a str for 'a'"), ({"files": {"../a": b"x"}}, "without folders"),
        ({"files": {"..": b"x"}}, "without folders"),
    ],
)  # fmt: skip
def test_what_is_no_argument_of_save_is_told_before_anything_is_written(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(BadOption, match=re.escape(told)):
        wholestep.save(tmp_path / "run", model=nn.Linear(2, 2), **given)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_on_loading_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    wholestep.save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), step=np.int64(3))
    other = nn.Linear(2, 2)
    before, adam = other.weight.clone(), torch.optim.Adam(other.parameters(), lr=0.1)
    with pytest.raises(BadCheckpoint, match="Adam has 'betas', the one that was saved dampening"):
        wholestep.load(tmp_path, model=other, optimizer=adam)
    for given in ({"step": 3}, {"optimizer": "adam"}, {"scheduler": "cosine"}):
        with pytest.raises(BadOption, match=f"{next(iter(given))}="):
            wholestep.load(tmp_path, model=other, **given)
    assert torch.equal(other.weight, before) and adam.param_groups[0]["lr"] == 0.1
    wholestep.load(tmp_path, model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert torch.equal(other.weight, model.weight)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(BadCheckpoint, match=r"could not be written to .*run: File exists"):
        save_small(tmp_path / "run")


@pytest.mark.gpu
def test_resuming_on_a_gpu_is_bit_for_bit(tmp_path: Path) -> None:
    """Eager, so that dropout draws from the CUDA generator."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            value = model(torch.ones(4, 8, device="cuda")).square().mean()
            value.backward()
            optimizer.step()
            losses.append(value.detach().cpu())
        return losses

    model, optimizer = make(0)
    train(model, optimizer)
    wholestep.save(tmp_path, model=model, optimizer=optimizer, step=5)
    expected = train(model, optimizer)
    other, fresh = make(1)
    wholestep.load(tmp_path, model=other, optimizer=fresh)
    assert equal(train(other, fresh), expected)
    assert all(entry["step"].is_cuda for entry in fresh.state.values())
