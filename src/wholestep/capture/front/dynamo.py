"""TorchDynamo's private side: one call captured under our settings, its guards in our hands.

In: a plain function and its arguments. Out: a `Frame`: Dynamo's graph, the code that calls it and then replays what the
Python did, and the guards. Guards are evaluated by us and not by the frame evaluator, so that nothing is captured unasked,
a miss can be named and counted, and no setting of torch's is touched while a step runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import logging
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import fx
from torch._dynamo import decorators
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import CheckFunctionManager, _get_closure_vars
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._guards import TracingContext

from wholestep import compat
from wholestep.capture import real_layouts
from wholestep.capture.front import (  # noqa: F401 - tell Dynamo what to do otherwise
    added_guards,
    asked,
    asked_gradients,
    decomposed,
    equal_layers,
    mends,
    numpy_values,
    own_code,
    own_containers,
    quick_guards,
    replaced,
    texts,
    written,
)
from wholestep.capture.front.absent_names import guard_names, places_of
from wholestep.capture.front.assumed import assuming
from wholestep.capture.front.growing import growing
from wholestep.capture.front.modes_left import functions_put_back, modes_put_back
from wholestep.capture.front.quiet import TALKATIVE, quiet
from wholestep.capture.front.sparse import attach_parts, is_matrix

SAFE = {
    "skip_nnmodule_hook_guards": False,  # True by default: a forward hook added later is not noticed
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # True by default: weights tied later are not noticed
    "skip_guards_on_constant_func_defaults": False,
    "assume_dunder_attributes_remain_unchanged": False,
    "fail_on_recompile_limit_hit": True,  # instead of running the frame in eager, without a word
    "suppress_errors": False,
    "guard_nn_modules": True,
    "use_recursive_dict_tags_for_guards": True,  # modules whose tables are untouched are not looked into: half the time
}
TRACING = {
    "trace_autograd_ops": True,  # torch.autograd.grad inside the loss: gradient penalties, physics-informed networks
    "allow_rnn": True,  # else "Attempted to wrap RNN, GRU, or LSTM"
    "allow_unspec_int_on_nn_module": True,  # False by default: `self.calls += 1` in a forward would capture every step
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "recompile_limit": 1000,  # `Front` counts
    "accumulated_recompile_limit": 100_000,
    "automatic_dynamic_local_pgo": False,  # sizes that another run of the program met
    "automatic_dynamic_remote_pgo": False,
    "verbose": False,
    "run_gc_after_compile": False,
}
SPECIALISED = {"specialize_float": True, "specialize_int": True}
"""Every value of a Python number is a capture of its own: for operators that take numbers only."""

_names = itertools.count()
_compile = torch.compile
"""torch's own, whatever a program puts in its place later."""


class Stopped(Exception):
    """Raised in place of running a graph that was only to be captured."""


@dataclasses.dataclass(eq=False)
class Frame:
    """One call as Dynamo captured it."""

    function: types.FunctionType
    """Called with the same arguments it calls the graph, and then does what the user's Python did beside it."""
    guards: Any
    read: list[tuple[str, Any]]
    """What a guard looks at: where it was found, as Dynamo writes it, and the object. Emptied by `watch_lives`."""
    addressed: list[Any]
    """What a guard compares by its address, as it does functions, classes and modules. Emptied by `watch_lives`."""
    codes: list[types.CodeType]
    """The code of every function that was traced."""
    sparse: frozenset[str] = frozenset()
    """Where sparse matrices were found, as Dynamo writes it."""
    lives: list[Any] = dataclasses.field(default_factory=list)
    dead: bool = False
    """An object that was compared by its address is gone, and the address may be used again; or guards cannot be asked."""

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        if self.sparse:
            self._attach_parts(arguments)
        try:
            with functions_put_back():
                return not self.dead and self.guards.check(arguments)
        except Exception:  # of a guard that Dynamo cannot ask: a parameter that is None now
            self.dead = True
            return False

    def _attach_parts(self, arguments: Mapping[str, Any]) -> None:
        """Guards, and the graph, look at the parts of sparse matrices."""
        scope = {**_get_closure_vars(), "L": arguments, "G": self.function.__globals__}
        for place in self.sparse:
            with contextlib.suppress(Exception):  # it is not there any more: a guard will say so
                found = eval(place, scope)
                if is_matrix(found):
                    attach_parts(found)

    def watch_lives(self) -> None:
        """Notice when an object goes that a guard knows by its address; hold on to none of them."""
        self.read.clear()
        while self.addressed:
            value = self.addressed.pop()
            if sys.getrefcount(value) <= 2:
                continue  # made for this look at it, as a bound method is
            with contextlib.suppress(TypeError):  # numbers, strings and plain containers are compared by value
                self.lives.append(weakref.ref(value, self._ended))

    def _ended(self, _: Any) -> None:
        self.dead = True

    def missed(self, arguments: Mapping[str, Any]) -> str:
        """The first guard that does not hold, in Dynamo's words; empty where all do."""
        try:
            with functions_put_back():
                found = self.guards.check_verbose(arguments)
        except Exception:
            return "something that a guard cannot be asked about: a parameter that is None now"
        return "" if found.result else " ".join(map(str, found.verbose_code_parts[:1]))


def fresh_name() -> str:
    """Dynamo remembers by the name of a function which sizes and numbers varied: one name per step."""
    return f"traced_{next(_names)}"


def copied(function: Callable[..., Any], name: str) -> types.FunctionType:
    """The function with a code object, and so a cache of Dynamo's, of its own, and with globals of its own."""
    return types.FunctionType(function.__code__.replace(co_name=name), dict(function.__globals__), name)


def switched_off() -> str | None:
    """Why torch.compile would run the plain function, or None."""
    stance = dynamo.eval_frame._stance.stance
    if dynamo.config.disable:
        return "torch.compile is switched off (TORCHDYNAMO_DISABLE or torch._dynamo.config.disable)"
    return None if stance == "default" else f"torch.compile is switched off (torch.compiler.set_stance({stance!r}))"


@contextlib.contextmanager
def settings(loggers: Any, lists: Iterable[str] = (), update: Iterable[Any] = (), **more: Any) -> Iterator[None]:
    """Dynamo's settings as a faithful capture needs them, for this process, while the context is open."""
    with compat.ONE_AT_A_TIME, mends.guards_not_timed(), dynamo.config.patch(**_wanted(loggers, more)), quiet():
        growing.on, growing.lists, assuming.on, assuming.sparse = True, frozenset(lists), True, set()
        growing.update, growing.stale = tuple(update), None
        try:
            yield
        finally:
            growing.on, growing.lists, growing.update, assuming.on = False, frozenset(), (), False
            equal_layers.forget_layers()


def _wanted(loggers: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Every setting that this torch knows."""
    logs = {"ignore_logging_functions": loggers, "reorderable_logging_functions": {print, warnings.warn}}
    wanted = {**SAFE, **TRACING, **logs, **more}
    return {name: value for name, value in wanted.items() if hasattr(dynamo.config, name)}


def saved_tensors_are_hooked() -> bool:
    """Whether `saved_tensors_hooks` (or `save_on_cpu`) is entered here."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class QuickSettings:
    """The same for a function that is called at every step: values are put in place without torch's ceremony (1.5 ms)."""

    def __init__(self, loggers: Any, **more: Any) -> None:
        entries = dynamo.config._config
        self.entries = [
            (entries[name], value) for name, value in _wanted(loggers, more).items() if entries[name].alias is None
        ]

    def __enter__(self) -> None:
        compat.ONE_AT_A_TIME.acquire()
        self.kept = [_put(entry, value) for entry, value in self.entries]
        self.silenced = [logger for logger in TALKATIVE if not logger.disabled]
        for logger in self.silenced:
            logger.disabled = True
        growing.on = True

    def __exit__(self, *exc: object) -> None:
        growing.on = False
        for logger in self.silenced:
            logger.disabled = False
        for (entry, _), value in zip(self.entries, self.kept, strict=True):
            _put(entry, value)
        compat.ONE_AT_A_TIME.release()


def _put(entry: Any, value: Any) -> Any:
    """Set what overrides a setting, and return what did before; torch 2.13 keeps it per thread, older ones do not."""
    held = entry.user_override
    if isinstance(held, contextvars.ContextVar):
        before = held.get()
        held.set(value)
        return before
    entry.user_override = value
    return held


class IgnoredLoggers(set):
    """Stands for the set of logging methods that are left out of a capture; remembers which were."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __contains__(self, method: Any) -> bool:
        owner = getattr(method, "__self__", None)
        if not isinstance(owner, logging.Logger) or method.__name__ not in _LOGGED:
            return False
        self.names.add(owner.name)
        return True

    def __deepcopy__(self, memo: Any) -> set:
        """For torch, which writes its settings into a log as JSON."""
        return set()


_LOGGED = {
    "debug", "info", "warning", "error", "critical", "exception", "log", "warn", "warning_once", "info_once", "warning_advice",
}  # fmt: skip


def capture_call(
    function: types.FunctionType,
    arguments: Mapping[str, Any],
    take: Callable[[fx.GraphModule], Callable[..., Any]],
    *,
    dynamic: bool | None,
    loggers: Any,
    lists: Iterable[str] = (),
    update: Iterable[Any] = (),
    **more: Any,
) -> Frame | None:
    """Capture one call of `function`; `take` gets the graph and returns what is called in its place.

    Nothing runs: neither the graph nor what the Python would do beside it. None where Dynamo made no graph. Raises what
    Dynamo raises where it cannot.
    """
    read: list[tuple[str, Any]] = []
    codes: list[types.CodeType] = []
    sparse: set[str] = set()
    addressed = assuming.addressed = dict[int, Any]()
    taking = [take]  # emptied at the end: Dynamo keeps the backend in C++, where no collector sees cycles
    scope = {"L": arguments, "G": function.__globals__}

    def backend(graph: fx.GraphModule, example: list[Any], **_: Any) -> Callable[..., Any]:
        context = TracingContext.get()
        codes[:] = context.traced_code
        sparse.update(assuming.sparse)
        read[:] = _read_by(context.guards_context.dynamo_guards, codes, scope)
        made = taking[0](graph)
        first = True

        def run(*args: Any) -> Any:
            nonlocal first
            if first:
                first = False
                raise Stopped
            return made(*args)

        return run

    mends.forget_imports()
    known = {id(entry.code) for entry in _debug_get_cache_entry_list(function.__code__)}
    compiled = _compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    try:
        with modes_put_back(), settings(loggers, lists, update, **more), contextlib.suppress(Stopped):
            compiled(**arguments)
    finally:
        assuming.addressed = None
        taking.clear()
        scope.clear()
        mends.forget_backend(backend)
    fresh = [entry for entry in _debug_get_cache_entry_list(function.__code__) if id(entry.code) not in known]
    if len(fresh) != 1:
        return None
    code, guards = fresh[0].code, fresh[0].guard_manager
    return Frame(
        types.FunctionType(code, function.__globals__, function.__name__), guards, read, [*addressed.values()], codes,
        frozenset(sparse),
    )  # fmt: skip


def _read_by(guards: Any, codes: Iterable[types.CodeType], scope: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the guards look at, and what that is reached through, by its place; guards of names that are missing are added."""
    scope = {**_get_closure_vars(), **scope}
    found: dict[Any, Any] = {}
    values: dict[Any, Any] = {}
    for place in places_of(guards):
        if place not in found:
            try:
                found[place] = place.get_value(scope, {}, values)  # as Dynamo itself evaluates them
            except Exception:
                found[place] = None
    guard_names(guards, codes, found)
    return [(place.name() if callable(place.name) else place.name, value) for place, value in found.items()]


def _addressed(plain: Callable[..., int]) -> Callable[..., int]:
    def id_ref(self: Any, value: Any, *where: Any) -> int:
        if getattr(assuming, "addressed", None) is not None:
            assuming.addressed[id(value)] = value
        return plain(self, value, *where)

    return id_ref


# ---- torch.rand([]) against a probability of 0: Hugging Face's layerdrop ----


SKIPPED_AT_RANDOM = "a layer is skipped at random: which layers run is decided in Python"


class ScalarDraw:
    """`torch.rand([])`, compared by HF's decoders with the probability of leaving a layer out: certain where that is 0."""

    def __lt__(self, probability: float) -> bool:
        if probability <= 0:
            return False
        raise RuntimeError(SKIPPED_AT_RANDOM)

    def __ge__(self, probability: float) -> bool:
        return not self < probability


def _new_draw() -> ScalarDraw:
    return ScalarDraw()


def _scalar_draw(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's handler for torch.rand, in graphs that are for us; None leaves it to the default."""
    if not getattr(growing, "on", False) or kwargs or len(args) != 1:
        return None
    if (
        not args[0].is_python_constant() or args[0].as_python_constant() != []
    ):  # as HF writes it; `()` is a tensor like any
        return None
    from torch._dynamo.variables import UserFunctionVariable

    return tx.inline_user_function_return(UserFunctionVariable(_new_draw), [], {})


def _not_for_us(plain: Callable[..., None]) -> Callable[..., None]:
    def mark(*args: Any, **kwargs: Any) -> None:
        if not getattr(assuming, "on", False):
            plain(*args, **kwargs)

    return mark


# an attribute of every tensor that a module or an optimizer holds, for recorded CUDA graphs: it would stay there
VariableBuilder.mark_static_input = _not_for_us(VariableBuilder.mark_static_input)
decorators.mark_static_address = _not_for_us(decorators.mark_static_address)
CheckFunctionManager.id_ref = _addressed(CheckFunctionManager.id_ref)
TorchInGraphFunctionVariable._get_handlers()[torch.rand] = _scalar_draw
mends.guard_classes()
mends.name_classes()
mends.mend_lstm()
mends.unpack_ranges()
mends.keep_validation()
compat.note_picked_sizes()
real_layouts.install()
