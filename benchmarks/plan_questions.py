"""Forty questions of the kind "will it fit?", answered on a CPU; and steps that ran on an H200, predicted so, as a scatter.

    python benchmarks/plan_questions.py                          # answers -> benchmarks/results/plan_questions.json
    python benchmarks/plan_questions.py --only bert-large        # some of them, added to the file
    python benchmarks/memory_budget.py --rows $(python benchmarks/plan_questions.py --rows) --out FILE     # the same on a GPU
    python benchmarks/plan_questions.py --measured FILE benchmarks/results/memory_budget.json --svg docs/images/predicted.svg

In: three models, several batches and sequence lengths, several cards. Out: JSON rows with the predicted card bytes of the plan
that was chosen, or of the leanest when none fits. With `--measured`, every row of memory_budget.py that Wholestep ran on all layers
within a budget stands beside the answer to its question; those that are not among the forty are asked now. A smaller card is
a budget on the large one. Misses (predicted to fit and refused there, or the other way round) are drawn as crosses, never left out.
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
from predicted_scatter import predicted_scatter

from wholestep.cost.target import find_target
from wholestep.graph.bytes import parse_bytes
from wholestep.train.fit import CapturedStep, Question, captured_step, will_it_fit
from wholestep.train.fit_text import fit_json

RESULTS = Path(__file__).resolve().parent / "results" / "plan_questions.json"
SIZES = {
    "llama-1b": ((2, 2048), (4, 2048), (8, 2048), (16, 2048)),
    "gpt2-medium": ((8, 1024), (16, 1024), (32, 1024)),
    "bert-large": ((16, 512), (32, 512), (64, 512)),
}
"""Model -> (batch, sequence length)."""
CARDS = ("h200", "a100-40gb", "rtx4090", "16GiB")
"""10 sizes on 4 cards: 40 questions."""
NAMES = {"llama": "llama-1b", "gpt2": "gpt2-medium", "bert": "bert-large"}
"""As the other benchmarks call them."""


def questions() -> list[dict[str, Any]]:
    return [
        {"model": model, "batch": batch, "seq": seq, "device": card}
        for model, sizes in SIZES.items() for (batch, seq), card in itertools.product(sizes, CARDS)
    ]  # fmt: skip


def as_row(asked: dict[str, Any]) -> str:
    """The question as a row of memory_budget.py."""
    short = {name: model for model, name in NAMES.items()}[asked["model"]]
    return f"{short}:wholestep:{find_target(asked['device']).device.memory_bytes}:{asked['batch']}"


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


def compared(measured: list[dict[str, Any]], known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured and what is predicted for the same step, batch and budget; `known` ones are not asked again."""
    rows = []
    for found in measured:
        whole = found["system"] == "wholestep" and found["layers"] == LAYERS[found["model"]]
        if not whole or "error" in found or not found["budget"]:
            continue
        facts = known.get(found["row"]) or predicted(found)
        row = {"row": found["row"], "ran": "peak_allocated_gib" in found, **facts}
        if row["ran"]:
            row |= {
                "measured_bytes": int(found["peak_allocated_gib"] * 2**30),
                "measured_seconds": found["step_ms"] / 1e3,
            }
            row |= {"card_bytes": int(found["peak_card_gib"] * 2**30)} if "peak_card_gib" in found else {}
        elif "smallest_gib" in found:
            row["smallest_bytes"] = int(found["smallest_gib"] * 2**30)
        rows.append(row)
        print(f"{found['row']:<36} {told(row)}", flush=True)
    return rows


def predicted(found: dict[str, Any]) -> dict[str, Any]:
    """The answer to a row that is none of the forty, asked for an H200."""
    name, budget = NAMES[found["model"]], parse_bytes(found["budget"])
    question = Question(
        model=name, batch=found["batch"], seq=SIZES[name][0][1], target=find_target("h200"), budget_bytes=budget
    )
    fit = will_it_fit(question, find_batch=False)
    point = fit_json(fit)["frontier"][fit.shown]
    return {"fits": fit.fits, "predicted_bytes": point["peak_bytes"], "predicted_seconds": point["seconds"]}


def answered(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The forty answers by the row that measures each."""
    return {
        as_row(row): {"fits": row["fits"], "predicted_bytes": row["peak_bytes"]}
        | ({"predicted_seconds": row["seconds"]} if row["device"] == "h200" else {})
        for row in rows
    }


def told(row: dict[str, Any]) -> str:
    says = f"predicted {row['predicted_bytes'] / 2**30:.2f} GiB{'' if row['fits'] else ', too much'};"
    if not row["ran"]:
        return f"{says} {'refused' if 'smallest_bytes' in row else 'did not run'}"
    error = row["predicted_bytes"] / row["measured_bytes"] - 1
    return f"{says} measured {row['measured_bytes'] / 2**30:.2f}, {error:+.1%}{'' if row['fits'] else ' of the leanest plan'}"


def scatter(rows: list[dict[str, Any]]) -> str:
    """Allocated peaks of what ran, and crosses where yes or no was wrong."""
    points = []
    for row in rows:
        right = row["fits"] == row["ran"]
        if row["ran"] or not right:
            expected = row["predicted_bytes"] / 2**30
            points.append((row["row"], expected, row["measured_bytes"] / 2**30 if row["ran"] else expected, right))
    return predicted_scatter(points, title="Peak of a step: predicted on a laptop, measured on an H200", unit="GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", help="one model, or one card")
    parser.add_argument("--rows", action="store_true", help="print the forty as rows for memory_budget.py")
    parser.add_argument("--measured", type=Path, nargs="+", help="files of memory_budget.py; draws the scatter")
    parser.add_argument("--svg", type=Path, default=RESULTS.with_suffix(".svg"))
    given = parser.parse_args()
    if given.rows:  # one card after the other: a size that was compiled for one is compiled for the next
        print(",".join(as_row(asked) for card in CARDS for asked in questions() if asked["device"] == card))
        return
    rows = read_rows(given.out)
    if given.measured is not None:
        missing = [str(path) for path in given.measured if not path.is_file()]
        if missing:
            sys.exit(f"plan_questions: there is no file {missing[0]}")
        held = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": []}
        kept = ("fits", "predicted_bytes", "predicted_seconds")
        before = {row["row"]: {k: row[k] for k in kept if k in row} for row in held.get("measured", [])}
        found = [row for path in given.measured for row in read_rows(path)]
        held["measured"] = compared(found, before | answered(rows))
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
            print(
                f"{' '.join(map(str, key(asked)))}: {said}, {row['card_bytes'] / 2**30:.1f} GiB, {took:.0f} s",
                flush=True,
            )
            given.out.write_text(json.dumps(held | {"rows": list(known.values())}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
