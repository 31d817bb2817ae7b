"""Damage to checkpoints: 200 of them, each refused with the file's name, none loaded."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.train.test_checkpoint import build, equal, everything, run
from torch import nn

import wholestep
from wholestep.errors import BadCheckpoint
from wholestep.train.checkpoint_hashes import HASHES, hash_of, read_hashes, write_hashes

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "checkpoint.json", HASHES)
NAMES = ("model", "optimizer", "scheduler", "step")
DAMAGED = 200

Harm = Callable[[Path, random.Random, Path, Path], None]
"""(the file, chance, the checkpoint before, that of another run)."""


def flip_bit(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def overwrite_eight_bytes(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data) - 8)
    data[at : at + 8] = bytes(byte ^ 0x5A for byte in data[at : at + 8])
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(1, len(data))])


def empty(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    path.unlink()


def append(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 50)))


def from_the_checkpoint_before(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    shutil.copyfile(before / path.name, path)


def from_another_run(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    shutil.copyfile(other / path.name, path)


def make_a_folder_of_it(path: Path, chance: random.Random, before: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: tuple[Harm, ...] = (
    flip_bit, overwrite_eight_bytes, truncate, empty, remove, append, from_the_checkpoint_before, from_another_run,
    make_a_folder_of_it,
)  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A run with checkpoints of steps 2 and 4, and another run's step 4, of the same sizes."""
    for name, seed in (("run", 0), ("other", 1)):
        built = build("dropout", seed)
        for number in (2, 4):
            run("dropout", built, number - 2, number)
            wholestep.save(tmp_path / name, **dict(zip(NAMES, built)), data={"seed": seed})
    return tmp_path / "run", tmp_path / "other" / "step-000004"


def test_two_hundred_damaged_checkpoints_are_refused_by_name(saved: tuple[Path, Path], tmp_path: Path) -> None:
    sound, other = saved
    chance, refused = random.Random(3), 0
    live = build("dropout", 5)
    before = everything(live)
    for number in range(DAMAGED):
        name, harm = FILES[number % len(FILES)], HARMS[number % len(HARMS)]
        shutil.copytree(sound, tmp_path / "harmed")
        newest = tmp_path / "harmed" / "step-000004"
        harm(newest / name, chance, newest.with_name("step-000002"), other)
        with pytest.raises(BadCheckpoint) as caught:
            wholestep.load(newest.parent, **dict(zip(NAMES, live)))
        text = str(caught.value)
        # A list of hashes that is another checkpoint's whole list is as good as any; then every file differs from it.
        named = "checkpoint.json" if name == HASHES and harm in (from_the_checkpoint_before, from_another_run) else name
        good = newest.with_name("step-000002")
        assert text.startswith(f"{newest} is damaged: {named} "), (harm.__name__, text)
        assert text.endswith(f"step-000002 is good: take it with `load('{good}')`."), (harm.__name__, text)
        refused += 1
        shutil.rmtree(tmp_path / "harmed")
    assert refused == DAMAGED and equal(everything(live), before), "nothing was loaded, not even half"
    assert wholestep.load(sound, **dict(zip(NAMES, live))).number == 4, "the sound one loads"


def test_every_file_met_every_harm() -> None:
    assert len({(i % len(FILES), i % len(HARMS)) for i in range(DAMAGED)}) == len(FILES) * len(HARMS)


def test_a_checkpoint_under_another_number_is_refused(saved: tuple[Path, Path]) -> None:
    sound, _ = saved
    shutil.copytree(sound / "step-000002", sound / "step-000009")
    with pytest.raises(
        BadCheckpoint, match=r"step-000009 is damaged: checkpoint.json is of step 2\. step-000004 is good"
    ):
        wholestep.load(sound, model=nn.Linear(2, 2))


def test_a_copy_under_a_name_of_ones_own_loads(saved: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "step-000004", tmp_path / "best")
    assert wholestep.load(tmp_path / "best", model=build("dropout", 5)[0]).number == 4


def test_what_is_wrong_with_a_file_is_said(saved: tuple[Path, Path]) -> None:
    path = saved[0] / "step-000004" / "model.safetensors"
    kept = hash_of(path)
    flip_bit(path, random.Random(0), path, path)
    text = f"model.safetensors is not what was saved: its sha256 begins with {hash_of(path)[:12]}, not {kept[:12]}. "
    with pytest.raises(BadCheckpoint, match=re.escape(text)):
        wholestep.load(saved[0], model=nn.Linear(2, 2))


def test_the_hashes_are_those_of_sha256sum(saved: tuple[Path, Path]) -> None:
    folder = saved[0] / "step-000004"
    hashes = read_hashes(folder)
    assert hashes == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.name != HASHES}
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--quiet", HASHES], cwd=folder, check=True)


def test_a_file_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    data = torch.arange(700_000).numpy().tobytes()
    (tmp_path / "long").write_bytes(data)
    assert hash_of(tmp_path / "long") == hashlib.sha256(data).hexdigest()
    write_hashes(tmp_path, ["long"])
    assert read_hashes(tmp_path) == {"long": hashlib.sha256(data).hexdigest()}
