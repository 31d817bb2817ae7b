"""A message function as Dynamo follows it: a graph of what it computes, and guards on all that it read to decide so.

In: the function, and shapes of what it will be given. Out: a `Program`, which holds as long as the guards do. Dynamo sees every
read: a closure's number, `self.training`, a module that is called, an element of a dictionary. In an eager call the guards are ours
to ask (`Guarded`). In a step that is captured, Dynamo comes by `run` while it follows the loss: the function is followed there and
then, so that its reads are guarded with those of the loss, and see what the loss has changed before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from wholestep.capture.front import dynamo as private
from wholestep.capture.front import traced as marks
from wholestep.capture.front.front import refusal
from wholestep.capture.front.replay import user_line
from wholestep.capture.front.unguarded import Unguarded
from wholestep.capture.gpu_autocast import gpu_autocast
from wholestep.capture.target import on_gpu
from wholestep.errors import CaptureRefused, UnsupportedModel, WholestepError
from wholestep.relational.lowering import lower
from wholestep.relational.messages import arguments_of, softmax_by
from wholestep.relational.program import Program
from wholestep.relational.trace import IDS, Shapes, free_primes, trace

_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_HINT = "give it as a parameter"


Narrow: TypeAlias = tuple[torch.dtype, str] | None
"""The dtype of autocast and the device whose rules it follows, where it is on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a program is made for."""

    aggregate: str
    shapes: Shapes
    narrow: Narrow
    on_gpu: bool = False
    """Whatever its tensors are on: those of a capture without a GPU are on none."""


@dataclasses.dataclass(eq=False, slots=True)
class Guarded:
    """A program, and whether what the message function read is as it was."""

    program: Program
    frame: private.Frame
    unguarded: Unguarded

    def holds(self, message: Any) -> bool:
        with _as_followed():
            return self.frame.holds({"message": message}) and self.unguarded.changed() is None


# ---- what Dynamo traces ----


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """In the place of what the function will be given."""
    return torch.empty(shape, dtype=dtype, device="cpu", requires_grad=dtype.is_floating_point).clone()


def _called(message: Any, shapes: Shapes, edges: int) -> Any:
    """Stand-ins in the order of the placeholders of a trace."""

    def rows(home: str) -> dict[str, Tensor]:
        return {name: stand_in((edges, *shape), dtype) for kind, name, shape, dtype in shapes if kind == home}

    src, dst, edge = rows("nodes"), rows("nodes"), rows("edges")
    params = {name: stand_in(shape, dtype) for kind, name, shape, dtype in shapes if kind == "params"}
    relation, _, *types_of_ends = [stand_in((edges,), torch.int64) for _ in IDS]
    e, p = arguments_of(src, dst, edge, params, relation, *types_of_ends)
    return message(e, p)


def _program_of(message: Any) -> None:
    """Found by Dynamo: the program is made and left in `_eager.program`."""


def run(message: Any, aggregate: str, shapes: Shapes, narrow: Narrow, *given: Any) -> Any:
    """Found by Dynamo: the program is made and followed in the place of this call."""


def _only_program(message: Any) -> Tensor:
    _program_of(message)
    return torch.zeros(())  # without an operation there is no graph, and without a graph there are no guards


for _mark in (stand_in, _program_of, run):
    torch.compiler.allow_in_graph(_mark)


class _Eager(threading.local):
    asked: Asked | None = None
    program: Program | None = None
    refused: WholestepError | None = None


_eager = _Eager()


def follow(message: Any, asked: Asked) -> Guarded:
    """For a call in eager PyTorch."""
    function, loggers = private.copied(_only_program, private.fresh_name()), private.IgnoredLoggers()
    _eager.asked, _eager.program, _eager.refused = asked, None, None
    try:
        # a user who switches torch.compile off does not mean this
        with _as_followed(), _disable_current_modes(), torch.compiler.set_stance("default"):
            frame = private.capture_call(
                function, {"message": message}, lambda graph: graph, dynamic=False, loggers=loggers, lists=(), update=(),
                disable=False, **private.SPECIALISED,
            )  # fmt: skip
        if frame is None or _eager.program is None:
            raise CaptureRefused("it makes no graph")
        guarded = Guarded(_eager.program, frame, Unguarded(None, frame.read, frame.codes))
        frame.watch_lives()
        return guarded
    except Exception as error:
        raise _refusal(error, _eager.refused) from error
    finally:
        _eager.asked = _eager.program = _eager.refused = None


def _refusal(error: Exception, refused: WholestepError | None) -> WholestepError:
    if refused is not None:  # Dynamo has added lines to its text
        return type(refused)(refused.what, where=refused.where, hint=refused.hint)
    found = error if isinstance(error, CaptureRefused) else refusal(error)
    if "ata-dependent" in found.reason:
        return _by_data(found.where)
    return UnsupportedModel(
        f"the message function cannot be followed: {found.reason}", where=found.where,
        hint="write it in plain PyTorch, and give what changes as a parameter",
    )  # fmt: skip


def _by_data(where: str | None) -> UnsupportedModel:
    what = "the message function decides by data: what comes of it depends on values"
    return UnsupportedModel(what, where=where, hint="use torch.where, which computes for every edge")


@contextlib.contextmanager
def _as_followed() -> Iterator[None]:
    """Guards look at modes. A program is the same with gradients or without, and is run under whatever modes there are."""
    if not torch._C._len_torch_function_stack() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        yield
        return
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    try:
        for mode in modes:
            if isinstance(mode, DeviceContext):  # where the function makes tensors
                _push_mode(mode)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for _ in range(torch._C._len_torch_function_stack()):
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def carry_out(forward: Any, narrow: Narrow, *given: Any) -> Any:
    """A program holds the casts of autocast, and what the message function kept out of it is not to be cast now."""
    if narrow is None:
        return forward(*given)
    with torch.autocast(narrow[1], enabled=False):
        return forward(*given)


# ---- inside of Dynamo ----


def _handle_program_of(function: Any, tx: Any, message: Any) -> Any:
    assert _eager.asked is not None
    try:
        _eager.program = _made(tx, message, _eager.asked)
    except WholestepError as refused:  # Dynamo would wrap it
        _eager.refused = refused
        raise
    return ConstantVariable.create(None)


def _handle_run(function: Any, tx: Any, message: Any, aggregate: Any, shapes: Any, narrow: Any, *given: Any) -> Any:
    aggregate, shapes, around = (constant.as_python_constant() for constant in (aggregate, shapes, narrow))
    narrow = around
    if on_gpu() and narrow is not None:
        narrow = narrow[0], "cuda"
    asked = Asked(aggregate, shapes, narrow, on_gpu())
    forward = UserFunctionVariable(type(_made(tx, message, asked).module).forward)
    arguments = [forward, ConstantVariable.create(around), ConstantVariable.create(None), *given]
    return tx.inline_user_function_return(UserFunctionVariable(carry_out), arguments, {})


TorchInGraphFunctionVariable._get_handlers()[_program_of] = _handle_program_of
TorchInGraphFunctionVariable._get_handlers()[run] = _handle_run


@contextlib.contextmanager
def _autocast(narrow: Narrow) -> Iterator[None]:
    """On stand-ins, which are on the CPU: autocast of a GPU has other rules."""
    dtype, device = narrow or (None, "cpu")
    rules = gpu_autocast() if device == "cuda" else contextlib.nullcontext()
    with rules, torch.autocast("cpu", dtype, enabled=narrow is not None):
        yield


def _made(tx: Any, message: Any, asked: Asked) -> Program:
    numbers = free_primes(asked.shapes)
    with torch.enable_grad(), _autocast(asked.narrow), softmax_by(lambda logits, within: logits.clone()):
        graphs = [_followed(tx, message, asked.shapes, edges) for edges in numbers]
    key = asked, torch.get_default_dtype(), torch.get_default_device(), *map(_described, graphs)
    with _disable_current_modes(), _autocast(asked.narrow):
        program = _programs.pop(key, None) or lower(
            trace(graphs, asked.shapes, numbers), asked.aggregate, on_gpu=asked.on_gpu
        )
    _programs[key] = program  # the latest is the last
    if len(_programs) > MOST_KEPT:
        del _programs[next(iter(_programs))]
    return program


MOST_KEPT = 64
_programs: dict[Any, Program] = {}
"""By the operations of the message function: layers that follow each other share one, and Dynamo, which may begin anew in the
middle of a capture, has to meet the same code again."""


def _described(module: fx.GraphModule) -> tuple[Any, ...]:
    number = {node: f"%{place}" for place, node in enumerate(module.graph.nodes)}

    def target(node: fx.Node) -> Any:
        return getattr(module, str(node.target)) if node.op == "get_attr" else node.target

    return tuple(
        (node.op, target(node), repr(fx.map_arg((node.args, node.kwargs), number.__getitem__)))
        for node in module.graph.nodes
    )


def _followed(tx: Any, message: Any, shapes: Shapes, edges: int) -> fx.GraphModule:
    """The function's operations, cut out of the graph that Dynamo is making."""
    graph, changed = tx.output.graph, _changed_by_now(tx)
    before = set(graph.nodes)
    given = [message, VariableTracker.build(tx, shapes), ConstantVariable.create(edges)]
    out = tx.inline_user_function_return(UserFunctionVariable(_called), given, {})
    if _changed_by_now(tx) != changed:
        raise UnsupportedModel(
            "the message function changes something outside of it",
            hint="it is followed once for many calls: return what it makes",
        )
    if not out.is_tensor():
        raise UnsupportedModel("the message function does not return a tensor with a row per edge", hint="return one")
    fresh = [node for node in graph.nodes if node not in before and node.op != "placeholder"]
    found = _cut_out(tx.output.nn_modules, fresh, out.as_proxy().node)
    depending = _depending(fresh)
    for node in reversed(fresh):
        if node in depending or _number(node) is None:  # numbers of the surroundings may be read again later
            graph.erase_node(node)
    return found


def _cut_out(root: Any, nodes: Sequence[fx.Node], out: fx.Node) -> fx.GraphModule:
    graph, depending = fx.Graph(), _depending(nodes)
    copies: dict[fx.Node, Any] = {}

    def copied(node: fx.Node, reader: fx.Node) -> Any:
        number = None if node in depending else _number(node)
        if number is not None:
            return _NUMBERS[type(number)](number)  # from now on guarded as this one
        if node not in copies:
            raise UnsupportedModel(
                f"the message function reads a tensor from outside: {_name(node)}", where=_line(reader), hint=_HINT
            )
        return copies[node]

    for node in nodes:
        if node.target is stand_in:
            copies[node] = graph.placeholder(f"given_{len(copies)}")
        elif node in depending or _number(node) is None:
            _refuse(node)
            copies[node] = graph.node_copy(node, lambda n, node=node: copied(n, node))
            copies[node].meta["line"] = _line(node)
    graph.output(copied(out, out))
    return fx.GraphModule(root, graph)


def _depending(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Those that are made from what the function is given."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node.target is stand_in or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _number(node: fx.Node) -> Any:
    """A number that Dynamo keeps as a symbol."""
    value = node.meta.get("example_value")
    return value if type(value) in _NUMBERS else None


def _name(node: fx.Node) -> str:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    name = getattr(source, "name", node.name)
    return str(name() if callable(name) else name)


def _line(node: fx.Node) -> str | None:
    return user_line(node.meta.get("stack_trace") or "")


def _refuse(node: fx.Node) -> None:
    if node.target is marks.mark_assumed:
        raise _by_data(_line(node))
    if "autograd_function_apply" in str(node.target):
        raise UnsupportedModel(
            "the message function calls a torch.autograd.Function", where=_line(node),
            hint="write it in plain PyTorch, whose derivative is known",
        )  # fmt: skip

    if getattr(node.target, "__module__", None) in (
        "torch._C._functorch",
        "torch._functorch.predispatch",
        "torch._functorch.vmap",
    ):
        raise UnsupportedModel(
            "the message function calls torch.vmap or another transform of torch.func", where=_line(node),
            hint="write it over all edges at once, edges in dimension 0",
        )  # fmt: skip


def _changed_by_now(tx: Any) -> list[Any]:
    """What Dynamo will change, when its graph has run, of what there was before."""
    effects = tx.output.side_effects
    found: list[Any] = [
        (id(variable), name, id(value))
        for variable, values in effects.store_attr_mutations.items()
        if isinstance(variable.mutation_type, AttributeMutationExisting)
        for name, value in values.items()
    ]
    for variable in effects.id_to_variable.values():
        kind, items = getattr(variable, "mutation_type", None), getattr(variable, "items", ())
        if isinstance(kind, ValueMutationExisting) and kind.is_modified:
            found.append((id(variable), [*map(id, items.values() if isinstance(items, dict) else items)]))
    return found
