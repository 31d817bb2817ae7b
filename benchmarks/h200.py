"""Hugging Face models on one GPU: eager, torch.compile, Liger and the whole step, a process each.

BERT-large, GPT-2-medium and a 1.2B Llama by default; a mixture of experts (Mixtral's, 8 layers of 8 experts), DeBERTa-v2-base
and Swin-tiny by name (mixtral, deberta, swin).

Same weights, data and seed for all: fp32 weights, bf16 compute, fused AdamW, dropout as configured. A `cold` row
starts from empty compile caches and holds everything measured; a `cached` row is a second process with the same
caches, stopped after its first step; `depth` rows count compiled regions at two depths. Rows are written as they
complete and are skipped when present, so a run that is cut short is continued by the same command.

    python benchmarks/h200.py --models bert,gpt2,llama --systems eager,compile,liger,wholestep --out FILE
                              [--budget-seconds 500] [--jobs 3]

Rows of the whole step are always made alone, since their first steps are part of what is claimed. With `--jobs` those of its peers
are made several at a time behind them, and timed in turns; their first steps then say little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))
SHAPES = {
    "bert": (32, 512), "gpt2": (16, 1024), "llama": (8, 2048), "mixtral": (4, 1024), "deberta": (16, 512),
    "swin": (128, 3, 224, 224), "tiny": (2, 16), "llama13b": (8, 2048),
}  # fmt: skip
LAYERS = {"bert": 24, "gpt2": 24, "llama": 16, "mixtral": 8, "deberta": 12, "swin": 12, "tiny": 2, "llama13b": 40}
SYSTEMS = ("eager", "compile", "liger", "wholestep")
WARM_UP = {
    "eager": 4,
    "compile": 4,
    "liger": 4,
    "wholestep": 12,
}  # the decision for a CUDA graph takes about eight steps
SETTLING, TIMED, PROFILED = 2, 12, 3
LOSSES_AT = (0, 4, 15)


# ---- in the child process ----


def build(name: str, layers: int) -> Any:
    import transformers as hf

    if name == "bert":
        config = hf.BertConfig(
            hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096
        )
        return hf.BertForMaskedLM._from_config(config, attn_implementation="sdpa")
    if name == "gpt2":
        config = hf.GPT2Config(n_embd=1024, n_layer=layers, n_head=16, use_cache=False)
        return hf.GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    if name == "mixtral":
        config = hf.MixtralConfig(
            hidden_size=768, num_hidden_layers=layers, num_attention_heads=12, num_key_value_heads=4, intermediate_size=2048,
            num_local_experts=8, num_experts_per_tok=2, vocab_size=32000, output_router_logits=True, use_cache=False,
        )  # fmt: skip
        return hf.MixtralForCausalLM._from_config(config, attn_implementation="sdpa")
    if name == "deberta":  # as microsoft/deberta-v3-base
        config = hf.DebertaV2Config(
            hidden_size=768, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=3072, relative_attention=True,
            position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
            max_position_embeddings=512, type_vocab_size=0, position_biased_input=False,
        )  # fmt: skip
        return hf.DebertaV2ForMaskedLM(config)
    if name == "swin":
        return hf.SwinForImageClassification(hf.SwinConfig(num_labels=1000))
    sizes = dict(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192, vocab_size=128256
    )
    if name == "llama13b":  # fp32 weights and AdamW's state take more than an H200 has
        sizes = dict(hidden_size=5120, num_attention_heads=40, intermediate_size=13824, vocab_size=32000)
    if name == "tiny":  # to try this script out where there is no GPU
        sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, vocab_size=99)
    config = hf.LlamaConfig(
        **sizes,
        num_hidden_layers=layers,
        tie_word_embeddings=name != "llama13b",
        max_position_embeddings=4096,
        use_cache=False,
    )
    return hf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def plain_loss(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


def torch_step(system: str, model: Any, optimizer: Any, device: str) -> Callable[[Any], Any]:
    import torch

    def autocast_loss(batch: dict[str, Any]) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return model(**batch).loss

    forward = torch.compile(autocast_loss) if system == "compile" else autocast_loss

    def step(batch: dict[str, Any]) -> Any:
        loss = forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def timed_steps(step: Any, batches: list[Any], count: int, first: int, losses: list[Any]) -> list[float]:
    """Milliseconds of each step, by CUDA events where there is a GPU."""
    import torch

    times = []
    for index in range(first, first + count):
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        began = time.perf_counter()
        if torch.cuda.is_available():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            losses.append(step(batches[index % len(batches)]))
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            losses.append(step(batches[index % len(batches)]))
            times.append(1e3 * (time.perf_counter() - began))
    return times


def unwaited_milliseconds(step: Any, batches: list[Any], count: int) -> float:
    """Of a step in a run in which nobody waits for any of them, as a loop trains that does not read every loss."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for index in range(count):
        step(batches[index % len(batches)])
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def kernel_milliseconds(step: Any, batches: list[Any]) -> float:
    """Device time of all kernels of one step, averaged over a few; overlapping streams are counted twice."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(PROFILED):
            step(batches[index % len(batches)])
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return sum(event.time_range.elapsed_us() for event in on_device) / PROFILED / 1e3


def child(name: str, system: str, kind: str, layers: int) -> dict[str, Any]:
    import torch

    if system == "wholestep":
        import wholestep.api  # imports are not part of the figures
    if system == "compile":
        import torch._dynamo
        import torch._inductor.compile_fx
    if system == "liger":  # its kernels take the place of the model's, which runs in eager PyTorch
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    from wholestep.bench.turns import my_turn, tune_in_turns

    tune_in_turns()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = build(name, layers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = make_batches(name, model, device)
    float(batches[0]["labels"].sum())  # the device is up
    began = time.perf_counter()
    if system == "wholestep":
        step: Any = wholestep.compile(model, plain_loss, optimizer, batches[0], precision="bf16")
    else:
        step = torch_step(system, model, optimizer, device)
    losses = [step(batches[0])]
    row: dict[str, Any] = {"first_loss": float(losses[0])}  # waits for the device
    row["first_step_seconds"] = time.perf_counter() - began
    if kind == "cold":
        with my_turn():
            row |= measure(system, step, batches, losses)
    if system == "wholestep":
        facts = {k: v for k, v in step.regions.items() if k != "driver"}
        row |= {"regions": facts, "rung": step.rung, "falls": [str(fall) for fall in step.falls]}
        row |= {"seconds": step.seconds, "explain": step.explain()}
    return row


def make_batches(name: str, model: Any, device: str) -> list[dict[str, Any]]:
    """Four batches of random tokens, or of random pictures."""
    import torch

    source = torch.Generator().manual_seed(0)
    if len(SHAPES[name]) > 2:
        pictures = [torch.randn(SHAPES[name], generator=source).to(device) for _ in range(4)]
        labels = [torch.randint(0, 1000, SHAPES[name][:1], generator=source).to(device) for _ in range(4)]
        return [{"pixel_values": picture, "labels": label} for picture, label in zip(pictures, labels, strict=True)]
    ids = [torch.randint(0, model.config.vocab_size, SHAPES[name], generator=source).to(device) for _ in range(4)]
    return [{"input_ids": i, "labels": i} for i in ids]


def measure(system: str, step: Any, batches: list[Any], losses: list[Any]) -> dict[str, Any]:
    import torch

    on_gpu = torch.cuda.is_available()
    timed_steps(step, batches, 1, 1, losses)  # some steps are captured only now, after one in eager
    if on_gpu:  # before a CUDA graph takes its memory out of the allocator's sight
        torch.cuda.reset_peak_memory_stats()
    timed_steps(step, batches, 1, 2, losses)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    timed_steps(step, batches, WARM_UP[system] - 3, 3, losses)
    if on_gpu:  # compilation and checks left blocks in the allocator that training does not need
        torch.cuda.empty_cache()
    timed_steps(step, batches, SETTLING, len(losses), losses)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = timed_steps(step, batches, TIMED, len(losses), losses)
    row: dict[str, Any] = {
        "step_ms": {"median": statistics.median(times), "min": min(times), "max": max(times), "all": times},
        "losses": {str(k): float(losses[k]) for k in LOSSES_AT},
        "tokens_per_second": batches[0].get("input_ids", batches[0]["labels"]).numel() / statistics.median(times) * 1e3,
    }
    if on_gpu:
        row["peak_allocated_gib"] = max(peak, torch.cuda.max_memory_allocated() / 2**30)
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        row["unwaited_ms"] = unwaited_milliseconds(step, batches, TIMED)
    if on_gpu and system == "wholestep":
        row["kernel_ms"] = kernel_milliseconds(step, batches)
        row["step_over_kernels"] = row["step_ms"]["median"] / row["kernel_ms"]
    return row


# ---- in the parent ----


def planned_rows(models: list[str], systems: list[str], depths: list[int], cached_peers: bool) -> list[dict[str, Any]]:
    """The rows in the order they are made: a cached row right after its cold one, whose caches it needs."""
    rows = []
    for name in models:
        for system in systems:
            if system == "liger" and name != "llama":
                continue  # it has no kernels for the other two
            rows.append({"model": name, "system": system, "kind": "cold", "layers": LAYERS[name]})
            if system == "wholestep" or (system == "compile" and cached_peers):
                rows.append({"model": name, "system": system, "kind": "cached", "layers": LAYERS[name]})
            if system == "wholestep":
                rows += [{"model": name, "system": system, "kind": "depth", "layers": depth} for depth in depths]
    return rows


def run_child(row: dict[str, Any], caches: Path, limit: float) -> dict[str, Any]:
    """The measurements of one row, or {"error": ...}."""
    folder = caches / f"{row['model']}-{row['system']}"
    if row["kind"] == "cold":
        shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "WHOLESTEP_CACHE_DIR": str(folder / "wholestep"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPYCACHEPREFIX": str(caches / "bytecode"),  # of modules, where the installed ones have none of their own
    }  # fmt: skip
    command = [sys.executable, __file__, "--child", json.dumps(row)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"cut_short": True}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        return {"error": (done.stderr.strip() or "no output")[-2000:]}
    return json.loads(answers[-1])


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model", "system", "kind", "layers"))


def facts() -> dict[str, Any]:
    import torch
    import transformers

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__,
            "cuda": torch.version.cuda, "transformers": transformers.__version__, "python": platform.python_version(),
            "commit": os.environ.get("WHOLESTEP_COMMIT") or commit.stdout.strip() or "unknown"}  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per model and system; the ratio is time (or memory) of the best peer over this system's."""
    found = {identity(row)[:3]: row for row in rows if "error" not in row and row["kind"] != "depth"}
    heads = f"{'ms':>8} {'vs best peer':>12} {'unwaited':>8} {'vs best':>7} {'alloc GiB':>9} {'resv GiB':>8}"
    heads += f" {'cold s':>7} {'cached s':>8}"
    print(f"{'model':<6} {'system':<10} {heads}")
    for name in dict.fromkeys(row["model"] for row in rows):
        cold = [found[k] for k in found if k[0] == name and k[1] != "wholestep" and k[2] == "cold"]
        peers = [row["step_ms"]["median"] for row in cold]
        free_peers = [row["unwaited_ms"] for row in cold if "unwaited_ms" in row]
        for system in SYSTEMS:
            row = found.get((name, system, "cold"))
            if row is None:
                continue
            ms = row["step_ms"]["median"]
            ratio = f"{min(peers) / ms:.2f}x" if peers else "-"
            memory = f"{row.get('peak_allocated_gib', 0):>9.1f} {row.get('peak_reserved_gib', 0):>8.1f}"
            cached = found.get((name, system, "cached"), {}).get("first_step_seconds", float("nan"))
            first = f"{row['first_step_seconds']:>7.1f} {cached:>8.1f}"
            free = row.get("unwaited_ms", float("nan"))
            flowing = f"{free:>8.1f} {min(free_peers, default=float('nan')) / free:>6.2f}x"
            print(f"{name:<6} {system:<10} {ms:>8.1f} {ratio:>12} {flowing} {memory} {first}")
    for row in rows:
        if "error" in row:
            print(f"failed: {identity(row)}: {row['error'].splitlines()[-1][:200]}")
        elif row["kind"] == "depth":
            counts = {k: v for k, v in row["regions"].items() if isinstance(v, int)}
            print(f"{row['model']} at {row['layers']} layers: {counts}")
        elif "kernel_ms" in row:
            print(f"{row['model']}: kernels {row['kernel_ms']:.1f} ms, step/kernels {row['step_over_kernels']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="bert,gpt2,llama")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--depths", default="4,8", help="layers at which compiled regions are counted; empty for none")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "h200.json")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir()) / "wholestep-h200")
    parser.add_argument("--budget-seconds", type=float, default=500.0)
    parser.add_argument("--cached-peers", action="store_true", help="also the second process of torch.compile")
    parser.add_argument("--cold-only", action="store_true", help="no second process of the whole step")
    parser.add_argument("--retry", action="store_true", help="make rows that failed before again")
    parser.add_argument("--jobs", type=int, default=1, help="rows of peers at work at once")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row = json.loads(options.child)
        print("\n" + json.dumps(child(*identity(row)), default=str), flush=True)
        return
    run_child(
        {"model": "tiny", "system": "wholestep", "kind": "cached", "layers": 1}, options.caches, 120.0
    )  # writes bytecode
    from wholestep.bench.turns import side_by_side

    deadline = time.monotonic() + options.budget_seconds
    rows: list[dict[str, Any]] = json.loads(options.out.read_text("utf-8"))["rows"] if options.out.exists() else []
    if options.retry:
        rows = [row for row in rows if "error" not in row]
    depths = [int(depth) for depth in options.depths.split(",") if depth]
    planned = planned_rows(options.models.split(","), options.systems.split(","), depths, options.cached_peers)
    present = {identity(row) for row in rows}
    planned = [r for r in planned if not (options.cold_only and r["kind"] == "cached") and identity(r) not in present]
    if options.jobs > 1:
        planned.sort(key=lambda row: row["system"] != "wholestep")
    alone = [row for row in planned if options.jobs == 1 or row["system"] == "wholestep"]
    lock = threading.Lock()

    def make(row: dict[str, Any], jobs: int = 1) -> None:
        left = deadline - time.monotonic()
        if left < 20:
            print(f"out of time before {identity(row)}; the same command goes on from here", flush=True)
            return
        print(f"{identity(row)} ...", flush=True)
        answer = run_child(row, options.caches, left)
        if "cut_short" in answer:
            print(f"out of time in {identity(row)}; the same command makes it again", flush=True)
            return
        with lock:
            rows.append(row | answer | ({"jobs": jobs} if jobs > 1 else {}))
            options.out.parent.mkdir(parents=True, exist_ok=True)
            document = json.dumps({"machine": facts(), "rows": rows}, indent=1)
            options.out.write_text(document + "\n", encoding="utf-8")

    for row in alone:
        make(row)
    side_by_side(lambda row: make(row, options.jobs), planned[len(alone) :], options.jobs)
    print_table(rows)


if __name__ == "__main__":
    main()
