"""Which implementation of ws::attention runs: a question for the tuner.

In: the arguments of a call, reduced to a Signature, or a name that a plan gives. Out: an Implementation. On CPU the rule is fixed
(the flash kernel where it applies, else math). On CUDA each eligible implementation is checked against the reference on one head
group and timed forward + backward on random data of the same shapes and strides: when a step is lowered (lower/tune.py), or at the
first call of one that no step makes.
"""

import functools
import sys

import torch

from wholestep.ops.attention import trial
from wholestep.ops.attention.implementations import IMPLEMENTATIONS, MATH
from wholestep.ops.attention.interface import Asked, Implementation, Signature
from wholestep.ops.call import Call
from wholestep.ops.tuner import TUNER, Candidate, Question, refuse_unusable, source_of

WHAT = "attention"
# Above this many bytes of float32 scores, math is not worth trying: it stores several such matrices.
MATH_BYTES = 8 * 2**30


@functools.cache
def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def signature_of(given: Asked) -> Signature:
    q, k, v, mask = given[:4]
    return Signature(
        device=_device_name(q.device),
        dtype=q.dtype,
        q_shape=tuple(q.shape),
        k_shape=tuple(k.shape),
        v_shape=tuple(v.shape),
        mask_dtype=None if mask is None else mask.dtype,
        mask_shape=None if mask is None else tuple(mask.shape),
        causal=given.causal,
        dropout=given.dropout_p > 0.0,
    )


def choose(given: Asked, kernel: str = "") -> Implementation:
    """The implementation for this call, or the one that a plan names; the same for its backward: only the signature counts."""
    signature = signature_of(given)
    if kernel:
        return _named(kernel, signature)
    known = TUNER.choices.get((WHAT, signature)) or TUNER.choose(question(signature, given))
    return IMPLEMENTATIONS[known.name]


def question(signature: Signature, given: Asked) -> Question:
    return Question(
        what=WHAT,
        call=signature,
        candidates=[_candidate(implementation, signature) for implementation in IMPLEMENTATIONS.values()],
        reference=MATH.name,
        stand_ins=functools.partial(trial.stand_in, given),
        device=given.q.device,
        source=source_of(sys.modules[__package__]),
        float64=given.q.dtype == torch.float64,
        measures=given.q.device.type == "cuda",
    )


def asked(call: Call) -> Question | None:
    """The question that a node of a graph asks, forward or backward; None where its sizes are symbols."""
    if not all(isinstance(size, int) for t in call.inputs for size in (*t.shape, *t.stride())):
        return None
    given = Asked(*(call[name] for name in Asked._fields))
    return question(signature_of(given), given)


def why_not(implementation: Implementation, signature: Signature) -> str | None:
    """The reason for which an implementation cannot take a call."""
    device_type = "cpu" if signature.device == "cpu" else "cuda"
    if implementation.device_type not in (device_type, "any"):
        return f"it runs on {implementation.device_type}, the call is on {device_type}"
    return implementation.supports(signature)


@functools.lru_cache(maxsize=1024)
def _named(kernel: str, signature: Signature) -> Implementation:
    reasons = {name: why_not(implementation, signature) for name, implementation in IMPLEMENTATIONS.items()}
    refuse_unusable(kernel, WHAT, str(signature), reasons)
    return IMPLEMENTATIONS[kernel]


def _candidate(implementation: Implementation, signature: Signature) -> Candidate:
    def wrong(given: Asked) -> str | None:
        return _too_large(implementation, signature) or trial.disagreement(implementation, given)

    return Candidate(
        name=implementation.name,
        supports=functools.partial(why_not, implementation, signature),
        wrong=wrong,
        prepare=functools.partial(trial.forward_and_backward, implementation),
    )


def _too_large(implementation: Implementation, signature: Signature) -> str | None:
    batch, heads, num_queries, _ = signature.q_shape
    num_bytes = 4 * batch * heads * num_queries * signature.k_shape[2]
    if implementation is MATH and num_bytes > MATH_BYTES:
        return f"its score matrix would take {num_bytes / 2**30:.0f} GiB"
    return None
