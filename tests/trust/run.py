"""Trains one case twice from fresh builds, as the plain loop people write and through `wholestep.compile`, and compares.

After each step: parameters, buffers, optimizer state, the returned loss and aux, what was raised, and the Python state
that the user's code wrote. Around `wholestep.compile`: everything the code can reach is as before (`surroundings`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo
from tests.trust.case import STEPS, Case, Made, modules_of, train
from tests.trust.compare import difference, kept
from tests.trust.surroundings import process_wide, surroundings

import wholestep
from wholestep import compat
from wholestep.errors import WholestepError, WholestepWarning

Verdict = Literal["whole", "loud", "refused", "WRONG", "error", "broken"]
Stepper = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case; `detail` says what differs and where, or why the step fell back."""

    case: Case
    verdict: Verdict
    detail: str
    seconds: float


@dataclasses.dataclass(slots=True)
class Watch:
    """Tells how a step ran: what it said, and whether it stayed whole."""

    step: Any
    reasons: list[str] = dataclasses.field(default_factory=list)
    left: str | None = None
    """The rung it fell to."""

    def look(self) -> None:
        self.reasons += [str(fall) for fall in getattr(self.step, "falls", ()) if str(fall) not in self.reasons]
        rung = getattr(self.step, "rung", "whole step")
        if rung not in (
            "whole step",
            "not captured yet",
        ):  # the latter: one real eager step, which the notes tell, comes first
            self.left = rung


def judge(
    case: Case,
    make_step: Callable[[Made], Stepper] | None = None,
    *,
    backend: str = "interpret",
    check: str = "off",
    cache: bool = False,
    alone: bool = False,
) -> Outcome:
    """The verdict on one case. `make_step` stands in for `wholestep.compile`; `alone` trains eager against eager."""
    began = time.perf_counter()

    def compiled(made: Made) -> Stepper:
        options = {"backend": backend, "check": check, "cache": cache, **made.options}
        example = made.batches[0][0] if "accumulate" in made.options else made.batches[0]
        return wholestep.compile(made.model, made.loss_fn, made.optimizer, example, **options)

    if not alone and make_step is None:
        warm_up(backend)
    try:
        theirs = run(case, eager, plain=True)[0]
    except Exception as error:
        where = " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(traceback.extract_tb(error.__traceback__)[-4:]))
        return Outcome(case, "broken", f"{type(error).__name__}: {error} ({where})", time.perf_counter() - began)
    maker = eager if alone else make_step or compiled
    watches: list[Watch] = []
    before = process_wide()
    try:
        said = run(case, maker, watches=watches, expected=theirs)[1]
    except Differs as found:
        verdict, detail = "WRONG", str(found)
    except Exception as raised:
        error, place = (raised.error, f"step {raised.step}: ") if isinstance(raised, Unexpected) else (raised, "")
        verdict = "refused" if isinstance(error, WholestepError) else "error"
        detail = f"{place}{type(error).__name__}: {error}"
    else:
        reasons = said + [reason for watch in watches for reason in watch.reasons]
        left = [watch.left for watch in watches if watch.left]
        if left and not reasons:
            verdict, detail = "WRONG", f"left the whole step for {left[0]!r} without a word"
        else:
            verdict, detail = ("loud" if reasons else "whole"), "; ".join(dict.fromkeys(reasons))
    left_over = difference(process_wide(), before)
    if left_over:
        torch.compiler.set_stance("default")
        verdict, detail = "WRONG", f"the run left something behind: {left_over}"
    return Outcome(case, verdict, " ".join(detail.split()), time.perf_counter() - began)


@functools.cache
def warm_up(backend: str) -> None:
    """What the first compile of a process imports and starts (warnings filters, worker threads) is no case's doing."""
    made = train()
    batch = made.batches[0]
    wholestep.compile(made.model, made.loss_fn, made.optimizer, batch, backend=backend, cache=False)(batch)


class Differs(Exception):
    """Ours and eager have parted."""


class Unexpected(Exception):
    """Ours raised at a step where eager did not."""

    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.step = error, step
        super().__init__(str(error))


def run(
    case: Case,
    maker: Callable[[Made], Stepper],
    *,
    plain: bool = False,
    watches: list[Watch] | None = None,
    expected: list[dict[str, Any]] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Build and train; a record per step, and the warnings of Wholestep. With `expected`, stop where one differs."""
    if case.has_forerunner and not plain:
        _forerun(case, maker)
    with built(case) as made, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = [made] if made.partner is None else [made, made.partner]
        parts = [dataclasses.replace(part, batches=made.batches) for part in parts]
        steps = [maker(part) if plain else _made_step(maker, part, made) for part in parts]
        watches = [] if watches is None else watches
        watches += [Watch(step) for step in steps]
        records = []
        with ThreadPoolExecutor(len(steps)) as pool:
            for i in range(STEPS):
                made.change(i)
                call = lambda step, i=i: _called(step, made.batches[i])  # noqa: E731
                results = list((pool.map if made.together else map)(call, steps))
                if not any(raised for _, raised in results):
                    made.after(i)
                for watch in watches:
                    watch.look()
                if plain and made.raises is not None:
                    _require_expected(results, made.raises.get(i))
                records.append(_record(parts, made, results))
                if expected is not None:
                    _require_equal(records[-1], expected[i], i, results)
    told = [str(w.message) for w in caught if issubclass(w.category, WholestepWarning)]
    return records, [text for text in told if text != str(compat.untested_version())]


def _forerun(case: Case, maker: Callable[[Made], Stepper]) -> None:
    with built(case, True) as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = maker(made)
        for i in range(2):
            made.change(i)
            step(made.batches[i])


@contextlib.contextmanager
def built(case: Case, *forerunner: bool) -> Iterator[Made]:
    """The case from the same seeds each time, and the process as before afterwards."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    made = case.build(*forerunner) if forerunner or not case.has_forerunner else case.build(False)
    try:
        yield made
    finally:
        made.cleanup()
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)


def _made_step(maker: Callable[[Made], Stepper], part: Made, made: Made) -> Stepper:
    before = surroundings(part, made)
    step = maker(part)
    changed = difference(surroundings(part, made), before)
    if changed:
        raise Differs(f"compile left something behind: {changed}")
    return step


def _called(step: Stepper, batch: Any) -> tuple[Any, BaseException | None]:
    try:
        return step(batch), None
    except (Exception, KeyboardInterrupt) as error:
        return None, error


def _record(parts: list[Made], made: Made, results: list[tuple[Any, BaseException | None]]) -> dict[str, Any]:
    found = {
        "raised": [type(raised).__name__ if raised else None for _, raised in results],
        "returned": [result for result, _ in results],
        "state": made.state(),
    }
    for p, part in enumerate(parts):
        for m, module in enumerate(modules_of(part.model)):
            found |= {
                f"{p}.{m}.{name}": tensor for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            }
        if part.optimizer is not None:
            found[f"{p}.optimizer"] = part.optimizer.state_dict()
    return kept(found)


def _require_expected(results: list[Any], wanted: type[BaseException] | None) -> None:
    """A case that fails in eager by mistake tests nothing."""
    for _, raised in results:
        if type(raised) is not (wanted or type(None)):
            raise RuntimeError(f"the plain loop raised {raised!r}, expected {wanted}") from raised


def _require_equal(ours: dict[str, Any], theirs: dict[str, Any], i: int, results: list[Any]) -> None:
    if ours["raised"] != theirs["raised"]:
        unexpected = [
            raised for (_, raised), name in zip(results, theirs["raised"]) if raised is not None and name is None
        ]
        if unexpected and isinstance(unexpected[0], KeyboardInterrupt):
            raise unexpected[0]  # of the person who runs the battery
        if unexpected:
            raise Unexpected(unexpected[0], i) from unexpected[0]
        raise Differs(f"step {i}: eager raised {theirs['raised']}, ours {ours['raised']} ({results})")
    found = difference(ours, theirs)
    if found:
        raise Differs(f"step {i}: {found}")


def eager(made: Made) -> Stepper:
    """The loop body that people write."""
    loss_fn = made.loss_fn or (lambda model, batch: model(**batch)["loss"])

    def step(batch: Any) -> Any:
        micro = batch if "accumulate" in made.options else [batch]
        trained = [p for m in made.modules for p in m.parameters()]
        if made.optimizer is not None:
            trained = [p for group in made.optimizer.param_groups for p in group["params"]]
            made.optimizer.zero_grad()
        losses, weights, aux = [], [], {}
        for part in micro:
            result = loss_fn(made.model, part)
            loss, aux = result if isinstance(result, tuple) else (result, {})
            weights.append(aux.get("weight", torch.ones(())).detach())
            (loss * weights[-1] if len(micro) > 1 else loss).backward()
            losses.append(loss.detach())
        total = torch.stack(weights).sum()
        if len(micro) > 1:
            for p in trained:
                p.grad = None if p.grad is None else p.grad / total
            aux = {"weight": total} if "weight" in aux else {}
        if made.options.get("clip_norm") is not None:
            torch.nn.utils.clip_grad_norm_(trained, made.options["clip_norm"])
        if made.optimizer is not None:
            made.optimizer.step()
        mean = losses[0] if len(micro) == 1 else (torch.stack(losses) * torch.stack(weights)).sum() / total
        return (mean, {name: value.detach() for name, value in aux.items()}) if aux else mean

    return step
