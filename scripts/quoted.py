"""Run the commands that README and docs quote, and compare their output with what the pages show; `--write` rewrites the pages.

In a page a fenced block `console` holds commands, each after `$ `, with what it printed below. The blocks of a page run one after
the other in a fresh folder, with `docs` and `examples` of the repository in it. A comment above a block says how it is compared:

    <!-- quoted: shape, head=12, timed -->

- nothing: line by line. Numbers of lines that tell durations or speeds count for nothing.
- `shape`: only the first word of every line that has one, for output that differs between machines (losses, samples).
- `head=N`, `tail=N`: the page shows the first or last N lines, and `...` for the others.
- `only=a|b`: the page shows the lines that begin with these words, and what is indented below them.
- `timed`: the page shows how long each command took, as `# 12 s`. Where a page says `Sections 1 to 5 took 76 seconds`,
  `--write` puts their sum there.
- `skip`: not run here; another test does.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/tutorial.md", "docs/plan.md")
BLOCK = re.compile(r"(?:<!-- quoted: (?P<how>[^>]*) -->\n)?```console\n(?P<body>.*?)```\n", re.DOTALL)
CLOCK = re.compile(r"\d\s?s\b|\d:\d\d\b|/s\b|\d\s?ms\b.*measured|^answered")
NUMBER = re.compile(r"\d[\d,.]*")
TOOK = r"Sections 1 to (?P<last>\d+) took \d+ seconds"
LONGEST = 1800
HOME = "/home/me"
"""What pages show in place of the folder that commands run in."""


@dataclasses.dataclass(frozen=True)
class Quote:
    """One command and what a page says it prints."""

    command: str
    output: str


def quotes_of(body: str) -> list[Quote]:
    """The commands of a block; a line that ends in a backslash goes on, `<<'END'` goes on to END."""
    found: list[list[str]] = []
    going_on = until_end = False
    for line in body.splitlines():
        if line.startswith("$ ") and not until_end:
            found.append([line[2:], ""])
        elif going_on or until_end:
            found[-1][0] += f"\n{line}"
        elif found:
            found[-1][1] += line + "\n"
            continue
        going_on = line.endswith("\\")
        until_end = ("<<'END'" in line or until_end) and line != "END"
    return [Quote(command, output) for command, output in found]


def commands_of(text: str) -> Iterator[str]:
    """Every command of a page's console blocks, and of its indented and bash blocks that call wholestep."""
    for block in BLOCK.finditer(text):
        yield from (quote.command for quote in quotes_of(block["body"]))
    rest = re.sub(r"```(?:console|python|toml|diff)\n.*?```\n", "", text, flags=re.DOTALL)
    joined = rest.replace("\\\n", " ")
    for line in re.findall(r"^(?: {4})?(wholestep [a-z].*)$", joined, re.MULTILINE):
        yield re.sub(r"\s+", " ", line.partition(" #")[0]).strip()


def comparable(output: str, how: Sequence[str]) -> list[str]:
    """What of an output has to be the same."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not re.match(r"# \d+ s$", line)]
    lines = cut([line for line in lines if line != "..."], how)
    if "shape" in how:
        return [line.split()[0] for line in lines if line[0].isalpha() and len(line.split()[0]) < 12]
    return [NUMBER.sub("#", line) if CLOCK.search(line) else line for line in lines]


def cut(lines: list[str], how: Sequence[str], *, dots: Sequence[str] = ()) -> list[str]:
    """The first or last lines, as the comment above the block says; `dots` in place of the others."""
    for word in how:
        name, _, count = word.partition("=")
        if name == "only":
            return _only(lines, count.split("|"))
        if name == "head" and len(lines) > int(count):
            return [*lines[: int(count)], *dots]
        if name == "tail" and len(lines) > int(count):
            return [*dots, *lines[-int(count) :]]
    return lines


def _only(lines: list[str], words: list[str]) -> list[str]:
    kept, keep = [], False
    for line in lines:
        keep = line.split()[0] in words if line[:1].strip() else keep
        kept += [line] if keep else []
    return kept


def shown(quote: Quote, output: str, seconds: float, how: Sequence[str]) -> str:
    """The quote as the page shall show it."""
    squeezed = re.sub(r"\n\s*\n\s*\n+", "\n\n", output.strip("\n"))
    lines = cut([line.rstrip() for line in squeezed.splitlines()], how, dots=["..."])
    return "\n".join([f"$ {quote.command}", *lines, *([f"# {seconds:.0f} s"] if "timed" in how else [])]) + "\n"


def run(command: str, folder: Path) -> tuple[str, float]:
    """What a command prints, and its seconds; an error when it fails."""
    programs = folder / ".programs"
    if not programs.exists():
        programs.mkdir()
        for name, line in (("wholestep", "-m wholestep "), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {line}"$@"\n')
            (programs / name).chmod(0o755)
        for name in ("docs", "examples"):
            (folder / name).symlink_to(ROOT / name)
    quiet = {"COLUMNS": "120", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    quiet |= {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait do not spin: others may use the machine
    fresh = {
        name: str(folder / ".cache") for name in ("WHOLESTEP_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    }  # as in a new clone
    environment = (
        os.environ | quiet | fresh | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    )
    began = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, timeout=LONGEST,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    harmless = re.sub(r"^(\$ |```)", r"    \1", done.stdout, flags=re.MULTILINE)  # no command, no end of the block
    return harmless.replace(str(folder), HOME), time.perf_counter() - began


def check_page(page: str, *, write: bool) -> list[str]:
    """What differs, in words; with `write` the page is rewritten instead."""
    path, wrong = ROOT / page, []

    with tempfile.TemporaryDirectory(prefix="wholestep-quoted-") as folder:

        def again(block: re.Match[str]) -> str:
            how = re.split(r",\s*", (block["how"] or "").strip())
            if "skip" in how:
                return block[0]
            parts = []
            for quote in quotes_of(block["body"]):
                output, seconds = run(quote.command, Path(folder))
                if comparable(output, how) != comparable(quote.output, how):
                    wrong.append(f"{page}: {quote.command}\n{_difference(quote.output, output, how)}")
                parts.append(shown(quote, output, seconds, how))
            return block[0].replace(block["body"], "".join(parts))

        text = BLOCK.sub(again, path.read_text("utf-8"))
    if write:
        path.write_text(added_up(text), "utf-8")
        return []
    return wrong


def added_up(page: str) -> str:
    """The page with the sum of the times of sections 1 to N where it tells it."""
    told = re.search(TOOK, page)
    if told is None:
        return page
    sections = page.partition(f"\n## {int(told['last']) + 1}.")[0]
    seconds = sum(map(int, re.findall(r"^# (\d+) s$", sections, re.MULTILINE)))
    return page.replace(told[0], f"Sections 1 to {told['last']} took {seconds} seconds")


def _difference(quoted: str, printed: str, how: Sequence[str]) -> str:
    import difflib

    both = comparable(quoted, how), comparable(printed, how)
    return "\n".join(list(difflib.unified_diff(*both, "quoted", "printed", lineterm=""))[:20])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--write", action="store_true", help="rewrite the pages with what was printed")
    given = parser.parse_args()
    wrong = [text for page in given.pages for text in check_page(page, write=given.write)]
    print("\n\n".join(wrong) or ("written" if given.write else "what the pages quote is what the commands print"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
