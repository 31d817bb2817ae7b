"""The wheel, as a user has it: small, typed, and every command works from another folder.

`pytest tests/test_wheel.py -m slow` installs it into an empty environment too, which takes pip minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 3 << 20
TINY = "--set width=16 --set layers=1 --set heads=2 --set tokenizer=bytes --batch 2 --seq 16"
SCRIPT = """\
import torch
import wholestep

model = torch.nn.Linear(2, 1)
step = wholestep.compile(model, None, None, {})
reveal_type(step)
reveal_type(wholestep.plan("gpt-1m").fits)
reveal_type(wholestep.train("gpt-1m").final_loss)
wholestep.compile(model, None, None, {}, acumulate=2)
wholestep.plna("gpt-1m")
"""
CONFIG = "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no wheel can be built here: {made.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("wholestep-*.whl")
    return wheel


def test_it_is_small_and_typed(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert "wholestep/py.typed" in names and not [name for name in names if name.startswith("tests")]


@pytest.fixture(scope="module", params=["borrowed", "empty"])
def installed(wheel: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, not the sources: `borrowed` has of everything else what this one has, `empty` what pip
    installs for the wheel, with its required dependencies alone."""
    folder = tmp_path_factory.mktemp(request.param) / "env"
    python = folder / "bin" / "python"
    if request.param == "borrowed":
        venv.create(folder, with_pip=False)
        (place,) = folder.glob("lib/python*/site-packages")
        zipfile.ZipFile(wheel).extractall(place)
        (place / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        return python
    venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"nothing can be installed here: {done.stderr.strip().splitlines()[-1:]}")
    assert subprocess.run([str(python), "-c", "import transformers"], capture_output=True, check=False).returncode != 0
    return python


def run(python: Path, folder: Path, words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-m", *words.split()], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_work_from_another_folder(installed: Path, tmp_path: Path) -> None:
    where = "import wholestep; print(wholestep.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.check_output([str(installed), "-c", where], cwd=tmp_path, env=environment, text=True)
    assert str(installed.parent.parent) in found
    assert run(installed, tmp_path, "wholestep --version").startswith("wholestep ")
    assert "fits" in run(installed, tmp_path, f"wholestep plan gpt-1m {TINY} --device t4 --precision fp32")
    run(
        installed,
        tmp_path,
        f"wholestep profile gpt-1m {TINY} --backend interpret --steps 2 --no-verify --out page.html",
    )
    assert (tmp_path / "page.html").exists() and (tmp_path / "page.json").exists()
    run(installed, tmp_path, f"wholestep train gpt-1m {TINY} --backend interpret --steps 2 --log csv --out run --quiet")
    assert run(installed, tmp_path, "wholestep sample run --tokens 5 --prompt to")
    assert "loss" in run(installed, tmp_path, "wholestep eval run")
    run(installed, tmp_path, "wholestep export run exported.safetensors")
    assert (tmp_path / "exported.safetensors").exists()


def test_a_users_script_finds_types(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        str(installed),
        "--config-file",
        "mypy.ini",
        "script.py",
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    for said in ("wholestep.runtime.step.Step", 'bool"', "float | None", "acumulate", "plna"):
        assert said in done.stdout.replace("Union[float, None]", "float | None"), done.stdout
