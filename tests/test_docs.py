"""The documents say what the code does."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tests.test_import_order import ORDER

import wholestep
from wholestep import api, commands

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"),
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
]


def test_the_step_by_step_page_is_what_the_stages_print() -> None:
    command = [sys.executable, "scripts/print_stages.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/print_stages.py to rewrite docs/step-by-step.md\n{done.stderr[-2000:]}"


@pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")
@pytest.mark.parametrize(
    "page", ["README.md", "docs/own-loop.md", "docs/fell-back.md", pytest.param("docs/runs.md", marks=pytest.mark.slow)]
)
def test_examples_for_users_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """The Python of a page, one block after the other, as a user copies it; interpreted, which starts at once."""
    monkeypatch.setattr(api, "compile", functools.partial(api.compile, backend="interpret"))
    monkeypatch.setattr(api, "verify", functools.partial(api.verify, backend="interpret"))
    monkeypatch.setattr(commands, "train", functools.partial(commands.train, backend="interpret"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    module = types.ModuleType("of_a_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks:
        exec(compile(block, page, "exec"), module.__dict__)
    printed = capsys.readouterr().out
    shown = {"docs/fell-back.md": "rung       eager", "docs/runs.md": "fits"}.get(page, "rung       whole step")
    assert blocks and shown in printed


BEFORE = """
import torch, wholestep
model = torch.nn.Sequential()
model.body, model.lm_head = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()), torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
batch = example_batch = torch.randn(8, 4)
loader = [batch]
loss_fn = lambda model, batch: model(batch).square().mean()
"""
LAYERS = """
import wholestep
from torch import nn
from torch.nn import Linear, ModuleDict
attention = lambda: ModuleDict({f"{name}_proj": Linear(8, 8) for name in "qkvo"})
layer = lambda: ModuleDict({"attn": attention(), "mlp": ModuleDict({"up": Linear(8, 16), "down": Linear(16, 8)})})
model = ModuleDict({"embed": nn.Embedding(10, 8), "layers": nn.ModuleList([layer(), layer()])})
"""
FRAGMENTS = {
    "docs/index.md": BEFORE, "docs/less-memory.md": BEFORE, "docs/offload.md": BEFORE, "docs/precision.md": BEFORE,
    "docs/sharding.md": LAYERS, "docs/lean-layers.md": "", "docs/profile.md": "",
}  # fmt: skip
"""What a page's Python takes for granted. That of data.md, after-training.md and schedule.md is run by other tests."""


@pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")
@pytest.mark.parametrize("page", FRAGMENTS)
def test_fragments_for_users_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "compile", functools.partial(api.compile, backend="interpret"))
    quick = functools.partial(commands.profile, backend="interpret", seq=16, follow_memory=False, verified=False)
    monkeypatch.setattr(commands, "profile", quick)
    names: dict[str, object] = {}
    exec(compile(FRAGMENTS[page], page, "exec"), names)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    for block in blocks:
        exec(
            compile(re.sub(r"host(\w*)=\"\d+GiB", r'host\1="1GiB', block), page, "exec"), names
        )  # any machine has that
    assert blocks


def test_the_function_of_the_data_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "my_data.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = {"vocab_size": 50, "layers": 1, "width": 16, "heads": 2}
    outcome = wholestep.train(
        "gpt-1m", data="my_data:batches", settings=small, steps=2, batch=2, seq=8, backend="interpret", quiet=True
    )
    assert outcome.steps == 2


def anchors(path: Path) -> set[str]:
    """What `#...` may name on a page: its headings, as GitHub and MyST write them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).replace("`", "").strip().lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_documents_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page} links to {target}: there is no such heading"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    trees = "\n".join(re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL))
    listed = {line for line in trees.splitlines() if line and not line.startswith(":")}
    assert listed == {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}


def test_the_file_map_is_whole_and_in_the_order_of_imports() -> None:
    page = (ROOT / "docs" / "file-map.md").read_text("utf-8")
    listed = re.findall(r"^ {6}(\w+)(?:\.py|/) ", page, re.MULTILINE)
    there = {
        path.stem for path in (ROOT / "src" / "wholestep").iterdir() if not path.name.startswith(("__", "py.typed"))
    }
    assert set(listed) == there and listed == [name for name in ORDER if name in there]


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    members = re.findall(r"automodule:: wholestep\.errors", page) and ["WholestepError", "WholestepWarning"]
    named = {
        *re.findall(r":: wholestep\.(\w+)", page),
        *members,
        *re.findall(r":: wholestep\.schedule\.(recipes)", page),
    }
    assert not set(wholestep.__all__) - named


def test_messages_of_the_troubleshooting_page_are_printed_by_something() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    at_work = page.partition("## Installing")[0]
    source = " ".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    plain = re.sub(r'"\s+f?"', "", re.sub(r"\s+", " ", source))
    messages = re.findall(r"^\| `([^`]+)` \|", at_work, re.MULTILINE)
    assert len(messages) >= 10 and not [m for m in messages if m not in plain]


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    html = (tmp_path / "tutorial.html").read_text("utf-8")
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)', html), "nothing is fetched"
