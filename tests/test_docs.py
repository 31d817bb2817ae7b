"""The documents say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_step_by_step_page_is_what_the_stages_print() -> None:
    command = [sys.executable, "scripts/print_stages.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/print_stages.py to rewrite docs/step-by-step.md\n{done.stderr[-2000:]}"


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    source = example.group(1).replace("optimizer, batch)", "optimizer, batch, backend='interpret')")
    exec(compile(source, "README.md", "exec"), {})  # the user's first ten lines
    assert "whole step" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_links_between_documents_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
