"""A stock fine-tuning script three times: transformers.Trainer, the same with torch_compile=True, and wholestep.hf.Trainer.

A BERT classifier from its config, a padding collator, evaluation, gradient accumulation over 4 micro-batches, clipping, a
linear schedule, saving. `padded` pads each micro-batch to its longest sequence (lengths differ from batch to batch), `fixed`
gives every sequence the same length. One process each; milliseconds are medians over optimizer steps after the warm-up.

    python benchmarks/hf_trainer.py --out FILE [--lengths padded,fixed] [--systems eager,compile,wholestep] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
SYSTEMS = ("eager", "compile", "wholestep")
LENGTHS = ("padded", "fixed")
STEPS, WARM_UP = 40, 16


def sequences(count: int, longest: int, vocabulary: int, padded: bool, seed: int) -> list[dict[str, Any]]:
    """Random ids whose label says whether the marker id is among them."""
    import torch

    source = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(longest // 4, longest + 1, (), generator=source)) if padded else longest
        ids = torch.randint(10, vocabulary, (length,), generator=source)
        label = int(torch.randint(0, 2, (), generator=source))
        ids[:4] = 5 if label else 6
        made.append({"input_ids": ids.tolist(), "labels": label})
    return made


def pad(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """To the longest of the micro-batch, with a mask."""
    import torch

    longest = max(len(e["input_ids"]) for e in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        mask[row, : len(example["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([e["labels"] for e in examples])}


def child(system: str, lengths: str, tiny: bool) -> dict[str, Any]:
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    cuda = torch.cuda.is_available()
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128) if tiny else {}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    longest, batch, steps = (32, 4, 24) if tiny else (256, 32, STEPS)
    data = [sequences(n, longest, 1000, lengths == "padded", seed) for n, seed in ((steps * batch * 4, 1), (64, 2))]
    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if cuda else None
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize() if cuda else None
            times.append(1e3 * (time.perf_counter() - self.began))

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=4, max_steps=steps,
            learning_rate=5e-5, lr_scheduler_type="linear", warmup_steps=4, bf16=cuda, max_grad_norm=1.0, logging_steps=4,
            eval_strategy="steps", eval_steps=steps // 2, save_steps=steps // 2, report_to=[], disable_tqdm=True, seed=0,
            torch_compile=system == "compile", use_cpu=not cuda, optim="adamw_torch_fused" if cuda else "adamw_torch",
        )  # fmt: skip
        if system == "wholestep":
            from wholestep import hf

            kind, extra = hf.Trainer, {"wholestep": {"verbose": False}}
        else:
            kind, extra = transformers.Trainer, {}
        trainer = kind(
            model=model, args=arguments, train_dataset=data[0], eval_dataset=data[1], data_collator=pad, callbacks=[Clock()],
            **extra,
        )  # fmt: skip
        began = time.perf_counter()
        trainer.train()
        total = time.perf_counter() - began
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluation = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    timed = times[min(WARM_UP, len(times) // 2) :]
    row: dict[str, Any] = {
        "step_ms": statistics.median(timed), "quartiles_ms": statistics.quantiles(timed, n=4), "first_step_s": times[0] / 1e3,
        "train_s": total, "losses": losses, "eval_losses": evaluation, "steps": len(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }  # fmt: skip
    if system == "wholestep":
        row["explain"] = trainer.step.explain().splitlines()
    return row


def environment() -> dict[str, Any]:
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--lengths", default=",".join(LENGTHS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print("ROW " + json.dumps(child(*options.child, options.tiny)))
        return
    rows: list[dict[str, Any]] = []
    for lengths in options.lengths.split(","):
        for system in options.systems.split(","):
            command = [sys.executable, __file__, "--out", options.out, "--child", system, lengths]
            done = subprocess.run(command + ["--tiny"] * options.tiny, capture_output=True, text=True, env=os.environ)
            found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
            row = json.loads(found[0]) if found else {"error": (done.stderr or "no output").strip().splitlines()[-1]}
            rows.append({"system": system, "lengths": lengths, **row})
            shown = f"{row['step_ms']:.1f} ms" if "step_ms" in row else row["error"]
            print(f"{lengths:7} {system:10} {shown}", flush=True)
            kept = {"environment": environment(), "commit": os.environ.get("WHOLESTEP_COMMIT"), "rows": rows}
            Path(options.out).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for lengths in options.lengths.split(","):
        by = {row["system"]: row for row in rows if row["lengths"] == lengths and "step_ms" in row}
        for peer in ("eager", "compile"):
            if peer in by and "wholestep" in by:
                print(f"{lengths}: ours / {peer} = {by['wholestep']['step_ms'] / by[peer]['step_ms']:.3f}")


if __name__ == "__main__":
    main()
