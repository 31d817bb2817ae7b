"""Which implementation of ws::attention runs, by measurement, remembered.

In: the arguments of a call, reduced to a Signature. Out: an Implementation. On CPU the rule is fixed (the flash kernel
where it applies, else math). On CUDA each eligible implementation is checked against the reference on one head group
and timed forward + backward on random data of the same shapes; the winner is kept in the process and in
`choices/attention.json` of the cache folder (see disk.py), keyed by signature, card and
torch version. Nothing is measured while a CUDA graph is being captured.
"""

import functools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from wholestep.disk import cache_folder, read_bytes, write_atomically
from wholestep.ops.attention import reference
from wholestep.ops.attention.implementations import IMPLEMENTATIONS, MATH
from wholestep.ops.attention.interface import Implementation, Signature

NUM_WARMUPS = 3
NUM_TIMED = 5
# Relative error of the norm that tells a wrong kernel from a low-precision one (bf16 rounds to 4e-3).
TOLERANCE = 5e-2
# Above this many bytes of float32 scores, math is not worth trying: it stores several such matrices.
MATH_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner for one signature, with what was measured: milliseconds by name, and why the others were left out."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    short_of_memory: bool = False
    """Whether memory did not suffice to try one that might have won: good for this process, not for others, which may have more."""


CHOICES: dict[Signature, Choice] = {}
_FILE_READ: dict[Path, dict[str, Choice]] = {}


@functools.cache
def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def signature_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Signature:
    return Signature(
        device=_device_name(q.device),
        dtype=q.dtype,
        q_shape=tuple(q.shape),
        k_shape=tuple(k.shape),
        v_shape=tuple(v.shape),
        mask_dtype=None if mask is None else mask.dtype,
        mask_shape=None if mask is None else tuple(mask.shape),
        causal=causal,
        dropout=dropout_p > 0.0,
    )


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Implementation:
    """The implementation for this call; the same for its backward, because only the signature counts."""
    signature = signature_of(q, k, v, mask, causal, dropout_p)
    found = CHOICES.get(signature)
    if found is None:
        found = _decide(signature, q, k, v, mask, causal, dropout_p)
        CHOICES[signature] = found
    return IMPLEMENTATIONS[found.name]


def measured_choices() -> list[dict[str, object]]:
    """Every choice of this process, as plain data for reports."""
    return [
        {"signature": {n: str(x) for n, x in asdict(signature).items()}, **asdict(choice)}
        for signature, choice in CHOICES.items()
    ]


def eligible(signature: Signature) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations that say yes, in order of trust, and the reasons of the others."""
    device_type = "cpu" if signature.device == "cpu" else "cuda"
    usable, skipped = [], {}
    for implementation in IMPLEMENTATIONS.values():
        if implementation.device_type not in (device_type, "any"):
            continue
        reason = implementation.supports(signature)
        if reason is None:
            usable.append(implementation)
        else:
            skipped[implementation.name] = reason
    return usable, skipped


def _decide(
    signature: Signature, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Choice:
    usable, skipped = eligible(signature)
    if signature.device == "cpu" or len(usable) == 1 or torch.cuda.is_current_stream_capturing():
        # A choice made inside a capture stays for this process: the captured forward and backward must agree.
        return Choice(usable[0].name, {}, skipped)
    path, text = choices_file(), _file_key(signature)
    known = _read(path).get(text)
    if known is not None and known.name in {i.name for i in usable}:
        return known
    choice, rows = measure(signature, usable, skipped, q, k, v, mask, causal, dropout_p), q.shape[0]
    if not choice.short_of_memory:
        _write(path, text, choice)
    while choice.short_of_memory and not choice.milliseconds and rows > 1:  # none could be tried: on fewer rows, then
        rows //= 2
        few = mask[:rows] if mask is not None and mask.dim() == 4 and mask.shape[0] > 1 else mask
        choice = measure(signature, usable, skipped, q[:rows], k[:rows], v[:rows], few, causal, dropout_p)
    return choice


# ---- measuring -----------------------------------------------------------------------------------------------


def measure(
    signature: Signature,
    usable: list[Implementation],
    skipped: dict[str, str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout_p: float,
) -> Choice:
    """Check and time each candidate on random data laid out like the arguments; a failure is a reason, not an error."""
    milliseconds, reasons, short = {}, dict(skipped), False
    generator_state = torch.cuda.get_rng_state(q.device)  # trial dropout must not move the user's random numbers
    try:
        for implementation in usable:
            reason = _too_large(implementation, signature)
            if reason is None:
                try:
                    reason = disagreement(implementation, q, k, v, mask, causal)
                    if reason is None:
                        milliseconds[implementation.name] = _time(implementation, q, k, v, mask, causal, dropout_p)
                except (RuntimeError, ValueError) as error:
                    reason = str(error).splitlines()[0]
                    short |= (
                        isinstance(error, torch.OutOfMemoryError) and implementation is not MATH
                    )  # which is never lean
            if reason is not None:
                reasons[implementation.name] = reason
    finally:
        torch.cuda.set_rng_state(generator_state, q.device)
    name = min(milliseconds, key=lambda n: milliseconds[n]) if milliseconds else MATH.name
    return Choice(name, milliseconds, reasons, short)


def _too_large(implementation: Implementation, signature: Signature) -> str | None:
    batch, heads, num_queries, _ = signature.q_shape
    num_bytes = 4 * batch * heads * num_queries * signature.k_shape[2]
    if implementation is MATH and num_bytes > MATH_BYTES:
        return f"its score matrix would take {num_bytes / 2**30:.0f} GiB"
    return None


def random_like(t: Tensor) -> Tensor:
    """Random values in the same memory layout, from a generator of its own."""
    generator = torch.Generator(device=t.device).manual_seed(t.numel())
    return torch.empty_like(t).normal_(generator=generator)


def disagreement(
    implementation: Implementation, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
) -> str | None:
    """Why the implementation is wrong on this machine: it is compared with the reference on one batch row and one head
    group."""
    q, k, v = random_like(q), random_like(k), random_like(v) * 0.5 + 0.25
    grad = random_like(reference.empty_out(q, v))
    scale = q.shape[-1] ** -0.5
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    out, logsumexp, _, _ = implementation.forward(q, k, v, mask, causal, scale, 0.0, None)
    grads = implementation.backward(grad, q, k, v, mask, out, logsumexp, zero, zero, causal, scale, 0.0, None)
    rows = q.shape[1] // k.shape[1]
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])[:1, :rows]
    q, k, v, grad = q[:1, :rows].float(), k[:1, :1].float(), v[:1, :1].float(), grad[:1, :rows].float()
    want_out, want_logsumexp = reference.forward(q, k, v, mask, causal, scale, 0.0, None)
    want = reference.backward(grad, q, k, v, mask, want_out, want_logsumexp, causal, scale, 0.0, None)
    for name, got, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), (want_out, *want), strict=True):
        part = got[:1, : expected.shape[1]].float()
        error = (part - expected).norm() / expected.norm().clamp(min=1e-6)
        if not bool(error <= TOLERANCE):
            return f"{name} differs from the reference by {float(error):.1e}"
    return None


def _time(
    implementation: Implementation, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> float:
    """Median milliseconds of forward + backward."""
    q, k, v = random_like(q), random_like(k), random_like(v)
    grad = random_like(reference.empty_out(q, v))
    key = torch.zeros((), dtype=torch.int64, device=q.device)
    times = []
    for trial in range(NUM_WARMUPS + NUM_TIMED):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out, logsumexp, seed, offset = implementation.forward(q, k, v, mask, causal, 0.125, dropout_p, key)
        seed, offset = key if seed is None else seed, key if offset is None else offset
        implementation.backward(grad, q, k, v, mask, out, logsumexp, seed, offset, causal, 0.125, dropout_p, key)
        end.record()
        end.synchronize()
        if trial >= NUM_WARMUPS:
            times.append(start.elapsed_time(end))
    return median(times)


# ---- the file ------------------------------------------------------------------------------------------------


def choices_file() -> Path:
    return cache_folder("choices") / "attention.json"


def _file_key(signature: Signature) -> str:
    """A choice holds for one torch version: kernels change with it."""
    return json.dumps({"torch": torch.__version__, **{n: str(x) for n, x in asdict(signature).items()}}, sort_keys=True)


def _read(path: Path) -> dict[str, Choice]:
    """The file's choices, read once; an unreadable file is an empty one."""
    if path not in _FILE_READ:
        try:
            _FILE_READ[path] = {text: Choice(**row) for text, row in json.loads(read_bytes(path) or b"{}").items()}
        except (ValueError, TypeError, AttributeError):
            _FILE_READ[path] = {}
    return _FILE_READ[path]


def _write(path: Path, text: str, choice: Choice) -> None:
    """Add one choice to the file; a read-only folder is no error."""
    known = _read(path)
    known[text] = choice
    write_atomically(path, json.dumps({t: asdict(c) for t, c in known.items()}, indent=1).encode())
