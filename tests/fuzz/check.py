"""Is this training step still the same after each stage of the compiler? A Case in, nothing out, or a `Wrong` that names the stage.

The stages: `capture` (the captured graph, unrewritten and interpreted, against eager PyTorch), every pass alone by its name,
`together` (all passes, with a plan), `compile` (the whole `wholestep.compile(check="off")` against eager) and `inductor` (compiled
code). Each trains three updates. What a pass calls bitwise is compared bit by bit: outputs, gradients, parameters, buffers and
optimizer state. Where other kernels may round differently, the rule of `wholestep.verify` decides, against float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from tests.fuzz.program import SEED, UPDATES, Case, loss_fn
from tests.fuzz.rounding import SHAKEN, SHAKES, Shaken, beyond_rounding, shaken
from torch import fx

import wholestep
from wholestep.capture import trace
from wholestep.capture.batch import flatten
from wholestep.capture.front import Front
from wholestep.capture.ladder import capture_whole
from wholestep.capture.reading import Reading, read
from wholestep.capture.subject import Subject, make_subject
from wholestep.capture.trace import Capture
from wholestep.errors import CaptureRefused
from wholestep.graph.check import check as check_graph
from wholestep.graph.copies import copy_graph
from wholestep.graph.keys import value_keys
from wholestep.graph.layers import without_calls
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Input, OutputKind, Role, Target, TrainingGraph, module_of, phase_of
from wholestep.lower import lower_interpret
from wholestep.ops.require import DoesNotHold
from wholestep.ops.tuned import calls_that_ask
from wholestep.passes.pipeline import TABLE, Pass, Pipeline, compiler_pass
from wholestep.passes.trips import Trips
from wholestep.runtime.variant import Variant, assumption_failed
from wholestep.verify.compare import distance
from wholestep.verify.report import TensorRow

PASSES = tuple(row.name for row in TABLE)
QUICK = ("capture", *PASSES, "together")
VERIFY_SLACK = 4.0
"""Times what `wholestep.verify` allows, for whole steps: the far tail of ten thousand."""
STAGES = (*QUICK, "compile", "inductor")
GROSS = 1e-3
"""Of a buffer's norm: what is further off after three updates in float32 is no rounding."""
REPEATS = 20
"""How often the graph as captured must repeat itself, where a stage does not."""
_FRESH = (Role.BATCH, Role.KEY, Role.HYPER)
"""Inputs that every call brings anew; all others are state."""

Values = dict[str, Any]


class Wrong(AssertionError):
    """A stage that trains something else, or fails."""

    def __init__(self, stage: str, what: str) -> None:
        self.stage, self.what = stage, what
        super().__init__(f"{stage}: {what}")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One run of the graph, or of the update's own graph in an accumulating step."""

    is_update: bool
    fresh: dict[Input, torch.Tensor]


@dataclasses.dataclass(slots=True)
class Recording:
    """A captured step, what its inputs were while it trained, and what it computed."""

    capture: Capture
    start: dict[Input, torch.Tensor]
    """State before the first update."""
    calls: list[Call]
    results: list[Values] = dataclasses.field(default_factory=list)
    references: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    """By the number of a call: what eager PyTorch and float64 make of it, the same for every stage."""
    shaken: dict[int, Shaken] = dataclasses.field(default_factory=dict)
    """By the number of a call: what roundings make of it."""


def assert_right(case: Case, stage: str | None = None) -> None:
    """Raise Wrong unless the case trains the same at that stage (all quick ones by default); a refusal is an error too."""
    refused = examine(case, QUICK if stage is None else (stage,))
    assert refused is None, f"not captured: {refused}"


def examine(case: Case, stages: Sequence[str] = QUICK) -> str | None:
    """Raise Wrong at the first stage that is; the reason where the step cannot be captured (it then trains in eager)."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _quick_captures():
        warnings.simplefilter("ignore")
        try:
            recording = _recorded(case, check_eager="capture" in stages)
            passes = passes_for(case)
            asked = {stage: [passes[stage]] for stage in stages if stage in PASSES}
            if "together" in stages:
                asked["together"] = list(passes.values())
            with _without_code():
                _check_each(case, recording, asked)
        except CaptureRefused as refused:
            if "capture" in stages:  # eager PyTorch trains it then, and `compile` must
                with _failing_as("compile"):
                    _check_compiled(case, None)
            return refused.reason
        if "compile" in stages:
            with _failing_as("compile"):
                _check_compiled(case, recording)
        if "inductor" in stages:
            with _failing_as("inductor"):
                _verified("inductor", case, recording, list(passes.values()), backend="inductor")
    return None


@contextlib.contextmanager
def _failing_as(stage: str) -> Iterator[None]:
    """Any error is a wrong stage."""
    try:
        yield
    except (Wrong, CaptureRefused):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise Wrong(stage, f"raised {type(error).__name__}: {lines[0][:300]}") from error


@contextlib.contextmanager
def _without_code() -> Iterator[None]:
    """Graphs are interpreted here, so FX need not write Python for each: a fifth of the time."""
    kept = fx.GraphModule.recompile
    fx.GraphModule.recompile = lambda self: None  # type: ignore[method-assign,assignment,return-value]
    try:
        yield
    finally:
        fx.GraphModule.recompile = kept  # type: ignore[method-assign]


@contextlib.contextmanager
def _quick_captures() -> Iterator[None]:
    """Few keys, since a drawn program takes few; and Dynamo does not empty the processor's caches to time its guards for a log."""
    with (
        mock.patch.object(trace, "UNKNOWN_CALLS", 0),
        mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0),
    ):
        yield


# ---- capture against eager ----


def _recorded(case: Case, check_eager: bool) -> Recording:
    """Capture, train the live model with the unrewritten graph, and compare with eager PyTorch."""
    model, optimizer = case.build()
    subject = make_subject(model, loss_fn, optimizer, **case.step)
    count = subject.accumulate
    batches = case.batches(UPDATES * count)
    look = _looking(subject) if case.guards and not _replaces_buffers(case) else _looking_without_guards(subject)
    with _failing_as("capture"):
        reading, capture = look(batches[0], lambda reading, _: (reading, capture_whole(subject, reading, batches[0])))
    if not capture.plans:  # gradients are handed to it, which no graph does
        raise CaptureRefused("the update is the optimizer's own code")
    recording = Recording(capture, {}, [])
    losses: list[Any] = []
    with _failing_as("capture"):
        check_graph(capture.graph)
        variant = Variant(subject, capture, reading, lower_interpret)
        for number, batch in enumerate(batches):
            again, args = look(batch, lambda reading, args: (reading, args))
            if reading is None:
                variant.brought = list(range(len(args)))
            elif again.graph is not reading.graph:
                raise CaptureRefused("another batch of the same shapes has another graph")
            if number % count == 0:
                variant.begin(args)
                for gradient in variant.binding.gradients.values():
                    gradient.zero_()
            numbers = () if reading is None else reading.graph.host(args)[0]
            variant.feed(SEED, number // count, number % count, numbers)
            inputs = variant.inputs(args)
            _note(recording, capture.graph, inputs, first=number % count == 0)
            try:
                losses.append([_kept(value) for value in variant.runner(inputs)])
            except DoesNotHold as error:  # a size that data tells is not what torch's tracing took it for
                raise assumption_failed(error, capture) from None
            if (number + 1) % count == 0:
                if capture.update is not None:
                    _note(recording, capture.update, variant.binding.inputs(capture.update, ()), is_update=True)
                    variant.update()
                variant.finish(None)
        recording.results = replayed(recording, capture.graph, capture.update)
        if check_eager:
            _check_against_eager(case, recording, model, optimizer, losses)
    return recording


Look = Callable[[Any, Callable[[Reading | None, Any], Any]], Any]
"""A batch, and what is to be made of (its reading, the arguments of the graph)."""


def _replaces_buffers(case: Case) -> bool:
    """Whether the forward puts other tensors in their place: what Dynamo does so beside its graph does not run here."""
    model, _ = case.build()
    before = list(model.buffers())
    with case.autocast(), torch.random.fork_rng(devices=[]):
        loss_fn(model, case.batches(1)[0])
    return any(map(operator.is_not, before, model.buffers()))


def _looking(subject: Subject) -> Look:
    """Through Dynamo, as `compile` does."""
    front = Front(subject)
    return lambda batch, take: front.look(batch, lambda graph, args: take(read(subject, graph, args, batch), args))


def _looking_without_guards(subject: Subject) -> Look:
    """By plain tracing, as `compile(guards="off")` does: twice as quick."""
    return lambda batch, take: take(None, flatten(batch)[0])


def _note(
    recording: Recording, graph: TrainingGraph, inputs: list[Any], *, first: bool = False, is_update: bool = False
) -> None:
    named = dict(zip(graph.inputs, inputs, strict=True))
    for entry, value in named.items():
        if entry.role not in _FRESH and entry not in recording.start:
            recording.start[entry] = replica(value)
    begins = (Role.GRADIENT,) if first else ()  # accumulation starts from zero again
    fresh = {entry: replica(value) for entry, value in named.items() if entry.role in (*_FRESH, *begins)}
    recording.calls.append(Call(is_update, fresh))


def _check_against_eager(case: Case, recording: Recording, model: Any, optimizer: Any, results: list[Any]) -> None:
    """Losses, aux, parameters, buffers and optimizer state, bit by bit; or within rounding."""
    capture = recording.capture
    if capture.num_sites == 0:
        twin, twin_optimizer = case.build()
        expected = eager_updates(case, twin, twin_optimizer)
        names = [entry.name for entry in capture.graph.outputs if entry.kind in (OutputKind.LOSS, OutputKind.AUX)]
        ours = [dict(zip(names, values, strict=False)) for values in results]
        ours.append(state_of(model, optimizer))
        expected.append(state_of(twin, twin_optimizer))
        if difference(expected, ours) is None:
            return
    found = beyond_rounding(case, recording, recording.results)
    if found is not None:
        _refuse_unless_repeated(recording)
        raise Wrong("capture", found)


def eager_updates(case: Case, model: Any, optimizer: Any) -> list[Values]:
    """The loop that people write; losses and aux of every batch."""
    count, found = case.step.get("accumulate", 1), []
    for number, batch in enumerate(case.batches(UPDATES * count)):
        if number % count == 0:
            optimizer.zero_grad(set_to_none=True)
        with case.autocast():
            result = loss_fn(model, batch)
        loss, aux = result if isinstance(result, tuple) else (result, {})
        (loss / count if count > 1 else loss).backward()
        found.append({"loss": loss.detach().clone(), **{name: value.detach().clone() for name, value in aux.items()}})
        if (number + 1) % count == 0:
            if case.step.get("clip_norm") is not None:
                trained = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(trained, case.step["clip_norm"])
            optimizer.step()
    return found


def state_of(model: Any, optimizer: Any) -> Values:
    """Parameters, buffers and what the optimizer keeps for each parameter."""
    found: Values = {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{key}"] = value
    return found


# ---- passes against the unrewritten graph ----


def passes_for(case: Case) -> dict[str, Pass]:
    """Every pass as the fuzzer runs it: on graphs of any size, with plans drawn at random."""
    found: dict[str, Pass] = {row.name: row.load() for row in TABLE}
    early, again = found["update_early"], found["recompute"]
    turned = found["channels_last"]
    found["channels_last"] = _as(
        "channels_last", lambda graph: turned(graph, force=not _narrow_images(graph)), "rounding"
    )  # type: ignore[call-arg]
    products = functools.partial(found["patch_products"], force=True)
    found["patch_products"] = _as("patch_products", products, "rounding")
    found["update_early"] = _as("update_early", functools.partial(early, min_bytes=0), "bitwise", for_updates=True)
    found["recompute"] = _as("recompute", lambda graph: again(graph, drawn_plan(graph, case.plan_seed)), "bitwise")  # type: ignore[call-arg]
    named = found["take_kernels"]
    found["take_kernels"] = _as(
        "take_kernels", lambda graph: named(graph, drawn_kernels(graph, case.plan_seed)), "rounding"
    )  # type: ignore[call-arg]
    marked = found["mark_regions"]
    found["mark_regions"] = _as(
        "mark_regions", lambda graph: marked(graph, drawn_regions(graph, case.plan_seed)), "rounding"
    )  # type: ignore[call-arg]
    pieces = functools.partial(found["cut_layers"], plan=Plan(cut_layers=True))
    found["cut_layers"] = _as("cut_layers", pieces, "bitwise")
    for name, drawn in (("offload", drawn_moves), ("stream_state", drawn_state)):
        found[name] = _as(
            name,
            functools.partial(_planned, found[name], drawn, case.plan_seed),
            "bitwise",
            for_updates=name == "stream_state",
        )
    found["share_scatters"] = functools.partial(found["share_scatters"], least_shared=1)
    for name in ("fold_constants", "bound_counts", "share_scatters"):
        numerics = "rounding" if name == "share_scatters" else "bitwise"
        found[name] = _as(name, functools.partial(_as_for_a_gpu, found[name]), numerics)
    return {name: found[name] for name in PASSES}


def _as_for_a_gpu(one: Pass, graph: TrainingGraph) -> TrainingGraph:
    """What a pass does for GPUs only is right on any device."""
    graph.target = Target("cuda")
    graph = one(graph)
    graph.target = Target()
    return graph


def _narrow_images(graph: TrainingGraph) -> bool:
    """Whether images are convolved in bf16: on a CPU torch's own kernels read memory that nobody wrote, channels-last.

    The weight's gradient is then NaN now and then. The pass is for GPUs; here it is only forced.
    """
    values = [node.meta["val"] for node in graph.operations() if node.target is torch.ops.aten.convolution.default]
    return any(value.dtype in (torch.bfloat16, torch.float16) for value in values)


def _as(name: str, function: Callable[..., TrainingGraph], numerics: str, for_updates: bool = False) -> Pass:
    def one(graph: TrainingGraph) -> TrainingGraph:
        return function(graph)

    one.__name__ = name
    return compiler_pass(numerics=numerics, for_updates=for_updates)(one)


def drawn_plan(graph: TrainingGraph, seed: int) -> Plan:
    """Some values of the forward, of which any may be recomputed."""
    source = random.Random(seed)
    share = source.choice((0.2, 0.5, 1.0))
    keys = sorted(set(value_keys(graph).values()))
    return Plan(recompute=tuple(key for key in keys if source.random() < share))


def _planned(one: Pass, drawn: Callable[[TrainingGraph, int], Plan], seed: int, graph: TrainingGraph) -> TrainingGraph:
    return one(graph, drawn(graph, seed))  # type: ignore[call-arg]


def drawn_moves(graph: TrainingGraph, seed: int) -> Plan:
    """Some of the values that can leave the card."""
    source, trips = random.Random(seed), Trips(graph)
    keys = sorted({key for node, key in value_keys(graph).items() if not trips.why_not(node)})
    return Plan(host=tuple(key for key in keys if source.random() < 0.7))


def drawn_state(graph: TrainingGraph, seed: int) -> Plan:
    """All optimizer state on the host."""
    return Plan(state={"*": "host"})


def drawn_regions(graph: TrainingGraph, seed: int) -> Plan:
    """Some modules, inside of each other or not, that are regions of their own."""
    source = random.Random(seed)
    modules = {without_calls(module_of(node) or "") for node in graph.operations() if phase_of(node) != "update"}
    return Plan(fuse=tuple(path for path in sorted(modules - {""}) if source.random() < 0.5))


def drawn_kernels(graph: TrainingGraph, seed: int) -> Plan:
    """Some implementation, of those that can, for every call that has a choice."""
    source, chosen = random.Random(seed), {}
    for call in calls_that_ask(graph):
        able = [one.name for one in call.question.candidates if one.supports() is None]
        chosen.setdefault(call.key, source.choice(able)) if able else None
    return Plan(kernel=chosen)


def _check_each(case: Case, recording: Recording, stages: dict[str, list[Pass]]) -> None:
    """Each list of passes on the captured graph: the same training, by bits or within rounding."""
    text = written(recording.capture.graph), written(recording.capture.update)
    copies: tuple[TrainingGraph, TrainingGraph | None] | None = None
    for stage, passes in stages.items():
        graph, update = copies or _own_copies(recording)
        copies, rounds = None, False
        with _failing_as(stage):
            looks, now = _Looks(graph), text[0]
            for one in passes:
                graph = one(graph)
                looks, before = _Looks(graph), looks
                if not looks.same_as(before):
                    check_graph(graph)
                    now, earlier = written(graph), now
                    rounds |= one.numerics == "rounding" and now != earlier  # type: ignore[attr-defined]
                if update is not None and one.for_updates:  # type: ignore[attr-defined]
                    update = one(update)
                    check_graph(update)
            if (now, written(update)) == text:
                copies = graph, update  # as good as new
                continue
            found = difference(recording.results, replayed(recording, graph, update))
            if found is not None and (rounds or _leaves_strides_open(graph)):
                found = beyond_rounding(case, recording, replayed(recording, graph, update, together=True))
            if found is not None:
                _refuse_unless_repeated(recording)
                raise Wrong(stage, found)


def _refuse_unless_repeated(recording: Recording) -> None:
    """No comparison is fair where the graph as captured gives other bits each time: some of torch's kernels read memory that
    nobody wrote (the weight's gradient of a grouped transposed bf16 convolution on a CPU)."""
    capture = recording.capture
    for number in range(REPEATS):
        dirt = [torch.full((size,), (-10.0) ** number) for size in range(1, 65) for _ in range(8)]
        del dirt  # malloc hands it out again
        again = difference(recording.results, replayed(recording, capture.graph, capture.update))
        if again is not None:
            raise CaptureRefused("torch's own kernels do not repeat themselves")


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}


def _leaves_strides_open(graph: TrainingGraph) -> bool:
    """Whether a product has an operand with a dimension of size one: its stride is anyone's, and BLAS goes by it."""
    operands = [entry for node in graph.operations() if node.target in _PRODUCTS for entry in node.all_input_nodes]
    return any(1 in entry.meta["val"].shape for entry in operands)


def _own_copies(recording: Recording) -> tuple[TrainingGraph, TrainingGraph | None]:
    update = recording.capture.update
    return copy_graph(recording.capture.graph), None if update is None else copy_graph(update)


class _Looks:
    """All that the check of a graph looks at, by identity: quicker to compare than to check, or to write as text."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.tables = (graph.inputs, graph.outputs, dict(graph.gradients), dict(graph.boundaries))
        nodes = list(graph.graph.nodes)
        self.plain = [(n.name, n.op, (n.meta.get("custom") or {}).get("phase"), "val" in n.meta) for n in nodes]
        self.kept = [part for n in nodes for part in (n, n.target, n.args, n.kwargs, n.meta.get("val"))]

    def same_as(self, other: _Looks) -> bool:
        """By identity, for 1 == 1.0 == True."""
        return (
            self.tables == other.tables
            and self.plain == other.plain
            and len(self.kept) == len(other.kept)
            and all(map(operator.is_, self.kept, other.kept))
        )


def written(graph: TrainingGraph | None) -> list[str]:
    """The graph as text: equal where a pass changed nothing."""
    if graph is None:
        return []
    lines = [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.graph.nodes]
    return [*lines, str(graph.outputs), str(graph.gradients)]


def replayed(
    recording: Recording, graph: TrainingGraph, update: TrainingGraph | None, *, together: bool = False
) -> list[Values]:
    """Train on the recorded inputs: after every call its outputs, gradients and state.

    From the recorded start, or `together` with the recording: every call starts from the state that was recorded there.
    """
    state = {entry: replica(value) for entry, value in recording.start.items()}
    runner = lower_interpret(graph, watch=list(graph.gradients.values()))
    update_runner = None if update is None else lower_interpret(update)
    dtypes = {
        name: graph_dtype(recording.capture.graph, node) for name, node in recording.capture.graph.gradients.items()
    }
    found: list[Values] = []
    for number, call in enumerate(recording.calls):
        used, run = (update, update_runner) if call.is_update else (graph, runner)
        assert used is not None and run is not None
        if together and number:
            before = recording.results[number - 1]
            state = {entry: replica(before[str(entry)]) for entry in recording.start}
        state.update({entry: replica(value) for entry, value in call.fresh.items()})
        values = run([state[entry] for entry in used.inputs])
        owned = {state[entry].untyped_storage().data_ptr() for entry in used.inputs if state[entry].numel()}
        returned = [entry for entry in used.outputs if entry.kind is not OutputKind.UPDATE]
        result = {
            f"{entry.kind.value} {entry.name}": _kept(value) for entry, value in zip(returned, values, strict=False)
        }
        for entry, value in zip(returned, values, strict=False):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in owned:
                raise AssertionError(
                    f"{entry.kind.value} {entry.name} lies in the memory of an input, which others write to"
                )
        if not call.is_update:
            for name, value in zip(graph.gradients, values[len(returned) :], strict=True):
                # a gradient may be held narrower than its parameter: what counts is what the update reads
                result[f"gradient of {name}"] = value.to(dtypes[name]).clone()
        result |= {str(entry): replica(state[entry]) for entry in recording.start}
        found.append(result)
    return found


def graph_dtype(graph: TrainingGraph, node: str) -> torch.dtype:
    dtype: torch.dtype = graph.node(node).meta["val"].dtype
    return dtype


# ---- whole steps ----


def _check_compiled(case: Case, recording: Recording | None) -> None:
    """`wholestep.compile` without its first check, against the loop that people write."""
    model, optimizer = case.build()
    count = case.step.get("accumulate", 1)
    batches = case.batches(UPDATES * count)
    options = {"backend": "interpret", "cache": False, "check": "off", **case.step}
    step = wholestep.compile(model, loss_fn, optimizer, batches[0], seed=SEED, **options)
    if step.graph is None or step.graph.indices(Role.KEY):
        return  # it runs in eager PyTorch, or draws its own random numbers
    losses: list[Values] = []
    for update in range(UPDATES):
        part = batches[update * count : (update + 1) * count]
        result = step(part[0] if count == 1 else part)
        loss, aux = result if isinstance(result, tuple) else (result, {})
        losses.append({"loss": _kept(loss), **{name: _kept(value) for name, value in aux.items()}})
    twin, twin_optimizer = case.build()
    expected = eager_updates(case, twin, twin_optimizer)
    if count > 1:  # how a Step adds up the losses of its micro-batches is its own business
        expected, losses = [], []
    expected.append(state_of(twin, twin_optimizer))
    losses.append(state_of(model, optimizer))
    found = difference(expected, losses)
    if found is not None:
        if "precision" not in case.step and _buffers_apart(case, expected[-1], losses[-1]):
            raise Wrong("compile", found)  # `verify` steps through the micro-batches by itself
        _verified("compile", case, recording, None, else_say=found)


def _buffers_apart(case: Case, expected: Values, ours: Values) -> bool:
    """Grossly, and further than where training starts from parameters that are off by a rounding. Adam makes whole steps of a
    gradient that is rounding alone (of a bias in front of a batch norm), and the norm's statistics go with it."""
    apart = [name for name, _ in case.build()[0].named_buffers() if _grossly_apart(expected[name], ours[name])]
    others = [_shaken_training(case, number) for number in range(SHAKES)] if apart else []
    spread = {name: max(distance(other[name], expected[name]) for other in others) for name in apart}
    return any(not distance(ours[name], expected[name]) <= SHAKEN * spread[name] for name in apart)


def _shaken_training(case: Case, seed: int) -> Values:
    """What eager PyTorch ends with where it starts a rounding away."""
    model, optimizer = case.build()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, model.parameters()):
            sides = torch.rand(parameter.shape, generator=source, dtype=torch.float64) * 2 - 1
            parameter.copy_(parameter.double() * (1 + torch.finfo(parameter.dtype).eps * sides))
    eager_updates(case, model, optimizer)
    return state_of(model, optimizer)


def _grossly_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double(), b.double()
    finite = bool(a.isfinite().all() and b.isfinite().all())
    return finite and float((a - b).norm()) > GROSS * (GROSS + float(a.norm()))


def _verified(
    stage: str,
    case: Case,
    recording: Recording | None,
    passes: list[Pass] | None,
    backend: str = "interpret",
    else_say: str = "",
) -> None:
    """The rule of `wholestep.verify`: no further from float64 than eager is, with these passes (None: the usual ones)."""
    model, optimizer = case.build()
    count = case.step.get("accumulate", 1)
    batches = case.batches(UPDATES * count)
    grouped = batches if count == 1 else [batches[i : i + count] for i in range(0, len(batches), count)]
    options = {name: value for name, value in case.step.items() if name != "nonfinite"}
    report = wholestep.verify(
        model, loss_fn, optimizer, grouped, steps=UPDATES, backend=backend, plan=Plan(), eval_too=False, seed=SEED,
        passes=None if passes is None else Pipeline(passes), **options,
    )  # fmt: skip
    if report.ok and recording is not None and len({row.step for row in report.rows}) < UPDATES:
        raise Wrong(stage, f"not all steps were captured: {report.notes}")
    slack = {"gradient": VERIFY_SLACK, "loss": VERIFY_SLACK}  # of what torch's optimizer makes of them nothing
    for row in report.rows:
        if not row.ok and not row.error <= slack.get(row.kind, 1.0) * row.tolerance + _rounding_of(row, recording):
            raise Wrong(stage, f"{else_say}; {report.first_departure}" if else_say else str(report.first_departure))


_NAMES = {"loss": "loss {}", "aux": "aux {}", "gradient": "gradient of {}", "buffer": "buffer:{}"}


def _rounding_of(row: TensorRow, recording: Recording | None) -> float:
    """What roundings alone may make of a row of `verify`: see `rounding.SHAKEN`."""
    if recording is None or row.kind not in _NAMES:
        return 0.0
    places = [place for place, call in enumerate(recording.calls) if not call.is_update]
    count = len(places) // UPDATES
    step = int(row.step) * count
    return SHAKEN * sum(shaken(recording, at).most(_NAMES[row.kind].format(row.name)) for at in places[step:][:count])


# ---- tensors ----


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the tensor does, overlaps and gaps included."""
    tensor = tensor.detach()
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def difference(expected: Sequence[Values], found: Sequence[Values]) -> str | None:
    """The first value that is not the same, in words; None when all are."""
    for number, (before, after) in enumerate(zip(expected, found, strict=True)):
        for name, value in before.items():
            if name not in after:
                if name.startswith("gradient of "):  # a gradient that nobody reads is not one any more
                    continue
                return f"update {number}: {name} is missing"
            told = _apart(value, after[name])
            if told is not None:
                return f"update {number}: {name} {told}"
    return None


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits as integers."""
    return tensor.view(_BITS[tensor.itemsize]) if tensor.is_floating_point() else tensor


def _apart(a: Any, b: Any) -> str | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if type(a) is type(b) and (a == b or a != a) else f"is {b!r}, not {a!r}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
    if torch.equal(_bits(a), _bits(b)):
        return None
    same = a == b
    if a.is_floating_point():
        same = (same & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return None
    far = (a.double() - b.double()).abs().max()
    return f"differs in {int((~same).sum())} of {same.numel()} elements, by {float(far):.3g} at most"
