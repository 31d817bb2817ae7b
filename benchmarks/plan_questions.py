"""Forty questions of the kind "will it fit?", answered on a CPU; and steps that ran on an H200, predicted so, as a scatter.

    python benchmarks/plan_questions.py                          # answers -> benchmarks/results/plan_questions.json
    python benchmarks/plan_questions.py --only bert-large        # some of them, added to the file
    python benchmarks/plan_questions.py --measured benchmarks/results/memory_budget.json --svg docs/images/predicted.svg

In: three models, several batches and sequence lengths, several cards. Out: JSON rows with the predicted card bytes of the plan
that was chosen, or of the leanest when none fits. With `--measured`, every row of memory_budget.py that Wholestep ran on all layers
within a budget is asked here with its own batch and budget, and what was predicted is kept beside what was measured. Misses
(predicted to fit and did not, or the other way round) are drawn as crosses, never left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from h200 import LAYERS

from wholestep.cost.target import find_target
from wholestep.graph.bytes import parse_bytes
from wholestep.report.fit import CapturedStep, Question, captured_step, will_it_fit
from wholestep.report.fit_text import fit_json
from wholestep.report.pictures.predicted_scatter import predicted_scatter

RESULTS = Path(__file__).resolve().parent / "results" / "plan_questions.json"
SIZES = {
    "llama-1b": ((2, 2048), (4, 2048), (8, 2048), (16, 2048)),
    "gpt2-medium": ((8, 1024), (16, 1024), (32, 1024)),
    "bert-large": ((16, 512), (32, 512), (64, 512)),
}
"""Model -> (batch, sequence length)."""
CARDS = ("h200", "a100-40gb", "rtx4090", "16GiB")
"""10 sizes on 4 cards: 40 questions. A card of a smaller size is asked of an H200 as a budget when it is measured."""


def questions() -> list[dict[str, Any]]:
    return [
        {"model": model, "batch": batch, "seq": seq, "device": card}
        for model, sizes in SIZES.items() for (batch, seq), card in itertools.product(sizes, CARDS)
    ]  # fmt: skip


def as_question(asked: dict[str, Any]) -> Question:
    target = find_target(asked["device"])
    budget = target.device.memory_bytes
    return Question(model=asked["model"], batch=asked["batch"], seq=asked["seq"], target=target, budget_bytes=budget)


def answer(asked: dict[str, Any], step: CapturedStep) -> dict[str, Any]:
    """One question as a row; the cards share one capture."""
    began = time.perf_counter()
    fit = will_it_fit(as_question(asked), step=step, find_batch=False)
    facts = fit_json(fit)
    point = facts["frontier"][fit.shown]
    return asked | {
        "fits": fit.fits, "budget_bytes": facts["budget_bytes"],
        "card_bytes": point["card_bytes"], "peak_bytes": point["peak_bytes"],
        "breakdown": point["breakdown"], "seconds": point["seconds"], "times": facts["times"], "recompute": point["recompute"],
        "precision": facts["settings"]["precision"],
        "frontier": [[p["card_bytes"], p["seconds"]] for p in facts["frontier"]],
        "seconds_to_capture": round(sum(step.seconds.values()), 1), "seconds_to_plan": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
    }  # fmt: skip


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["batch"], row["seq"], row.get("device", "h200")


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    return held["rows"] if isinstance(held, dict) else held


NAMES = {"llama": "llama-1b", "gpt2": "gpt2-medium", "bert": "bert-large"}


def compared(measured: list[dict[str, Any]], known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured and what is predicted for the same step, batch and budget; `known` ones are not asked again."""
    rows = []
    for found in measured:
        whole = found["system"] == "wholestep" and found["layers"] == LAYERS[found["model"]]
        if not whole or "error" in found or not found["budget"]:
            continue
        name, target, budget = NAMES[found["model"]], find_target("h200"), parse_bytes(found["budget"])
        seq = SIZES[name][0][1]
        facts = known.get(found["row"])
        if facts is None:
            asked = Question(model=name, batch=found["batch"], seq=seq, target=target, budget_bytes=budget)
            fit = will_it_fit(asked, find_batch=False)
            point = fit_json(fit)["frontier"][fit.shown]
            facts = {"fits": fit.fits, "predicted_bytes": point["peak_bytes"], "predicted_seconds": point["seconds"]}
        ran, error = "peak_allocated_gib" in found, "did not run"
        row = {"row": found["row"], "ran": ran, **{k: facts[k] for k in ("fits", "predicted_bytes", "predicted_seconds")}}
        if ran:
            row |= {"measured_bytes": int(found["peak_allocated_gib"] * 2**30), "measured_seconds": found["step_ms"] / 1e3}
            error = f"{row['predicted_bytes'] / row['measured_bytes'] - 1:+.1%}"
        rows.append(row)
        print(f"{found['row']:<28} predicted {facts['predicted_bytes'] / 2**30:.2f} GiB, {error}", flush=True)
    return rows


def scatter(rows: list[dict[str, Any]]) -> str:
    """Allocated peaks; a miss is a step whose yes or no was wrong."""
    points = []
    for row in rows:
        predicted = row["predicted_bytes"] / 2**30
        seen = row["measured_bytes"] / 2**30 if row["ran"] else predicted
        points.append((row["row"], predicted, seen, row["fits"] == row["ran"]))
    return predicted_scatter(points, title="Peak of a step: predicted on a laptop, measured on an H200", unit="GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", help="one model, or one card")
    parser.add_argument("--measured", type=Path, help="rows of memory_budget.py; asks for each and draws the scatter")
    parser.add_argument("--svg", type=Path, default=RESULTS.with_suffix(".svg"))
    given = parser.parse_args()
    rows = read_rows(given.out)
    if given.measured is not None:
        if not given.measured.is_file():
            sys.exit(f"plan_questions: there is no file {given.measured}")
        held = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": []}
        held["measured"] = compared(read_rows(given.measured), {row["row"]: row for row in held.get("measured", [])})
        given.out.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        given.svg.write_text(scatter(held["measured"]), encoding="utf-8")
        print(f"{given.svg} written")
        return
    held = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    wanted = {key(asked) for asked in questions()}
    known = {key(row): row for row in rows if key(row) in wanted}
    step, of = None, None
    for asked in questions():
        if given.only in (None, asked["model"], asked["device"]):
            if key(asked)[:3] != of:
                step, of = captured_step(as_question(asked)), key(asked)[:3]
            row = known[key(asked)] = answer(asked, step)
            said = "fits" if row["fits"] else "does not fit"
            took = row["seconds_to_capture"] + row["seconds_to_plan"]
            print(f"{' '.join(map(str, key(asked)))}: {said}, {row['card_bytes'] / 2**30:.1f} GiB, {took:.0f} s", flush=True)
            given.out.write_text(json.dumps(held | {"rows": list(known.values())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
