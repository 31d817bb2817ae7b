"""The only file that touches private torch APIs that differ between versions, or may.

Everything here exists in torch 2.11 and 2.13; a name that moves is mended here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.nn.utils import stateless

TESTED_TORCH = ("2.11", "2.13")
"""The oldest and the newest version the tests ran on."""


def torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


@functools.cache
def untested_version() -> str | None:
    """What to say about a torch newer than any tested one; None when there is nothing to say."""
    if torch_version() <= tuple(map(int, TESTED_TORCH[-1].split("."))):
        return None
    return f"torch {torch.__version__} is newer than the tested {TESTED_TORCH[-1]}; wholestep.verify tells whether all is well"


@functools.cache
def installed_version(package: str) -> str | None:
    """None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


FakeMode = FakeTensorMode
GraphModule = _LazyGraphModule
"""Writes its Python code when somebody calls or prints it: most graphs are neither called nor printed."""
ONE_AT_A_TIME = threading.RLock()
"""fx and Dynamo keep flags and settings for the whole process: two threads that capture would spoil them for each other."""


def new_fake_mode() -> FakeTensorMode:
    """A mode whose tensors have shapes and no data; real tensors that reach it (closures) are taken in and noticed later."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def has_symbols(env: ShapeEnv) -> bool:
    """Whether any size, or number, is symbolic so far."""
    return bool(env.var_to_range)


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def to_fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of the same shape, strides, dtype and device, all sizes static."""
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def stand_in(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake of the same shape, strides and dtype on `device`, for a tensor that has no data (device meta)."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def lacks_cpu_autocast(name: str) -> bool:
    """Whether CPU autocast has no rule for an aten operator."""
    return not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")


def below_cpu_autocast() -> Any:
    """Context: CPU autocast is not asked again."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def new_symbol(mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """One symbolic size, to be shared by every input dimension that means the same thing."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    env = mode.shape_env
    assert env is not None
    symbol = env.create_unspecified_symbol(hint, source, DimDynamic.DYNAMIC)
    made = env.create_symintnode(symbol, hint=hint, source=source)
    env.constrain_symbol_range(symbol, 2, 1 << 24)
    return made


def trace(
    function: Callable[..., Any], arguments: list[Any], *, mode: FakeTensorMode, functional: bool = False
) -> fx.GraphModule:
    """One make_fx pass. `functional` removes mutations (legal only where no autograd is left inside)."""
    traced = torch.func.functionalize(function, remove="mutations") if functional else function
    with (
        ONE_AT_A_TIME,
        mode,
        tracing(TracingContext(mode)),
        enable_python_dispatcher(),
        fx_traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        torch.no_grad() if functional else contextlib.nullcontext(),
        _use_lazy_graph_module(True),
    ):
        return make_fx(traced, record_module_stack=False, _disable_torch_fn_metadata_mode=True)(*arguments)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A trace makes a million objects that all stay: looking for garbage among them is a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def recorded_graph() -> fx.Graph:
    """The graph that the trace at work writes."""
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def recorded_node(value: torch.Tensor) -> fx.Node:
    """The node that stands for a value in the trace at work."""
    mode = get_proxy_mode()
    assert mode is not None
    return get_proxy_slot(value, mode.tracer).proxy.node


def as_recorded(value: torch.Tensor) -> torch.Tensor:
    """What the trace at work may return for a value: itself, if the trace has made it."""
    mode = get_proxy_mode()
    return value.detach() if mode is None or get_proxy_slot(value, mode.tracer, None) is None else value


def annotate(**facts: Any) -> Any:
    """Context: every node made inside carries `facts` in meta["custom"]."""
    return fx_traceback.annotate(facts)


def noted(fact: str) -> Any:
    """What an annotation says about the operation that is traced now; None where there is none."""
    return (fx_traceback.current_meta.get("custom") or {}).get(fact)


def noted_source() -> str | None:
    """The source line of the operation that is traced now, where an annotation says it."""
    return noted("source")


def number_backward(loss: torch.Tensor) -> None:
    """Backward nodes will carry the sequence number of the forward operator they belong to."""
    if loss.grad_fn is not None:
        setup_stacktrace_preservation_hooks([loss.grad_fn])


def swapped_tensors(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Any:
    """Context: `module` runs on `tensors` instead of its own parameters and buffers."""
    return stateless._reparametrize_module(module, tensors)


def shape_guards(mode: FakeTensorMode) -> list[Any]:
    """The facts about symbolic sizes that the trace relied on, as sympy expressions."""
    env = mode.shape_env
    return [] if env is None else [guard.expr for guard in env.guards]


SizeFromData = GuardOnDataDependentSymNode
"""What is computed depends on a size that only data tells."""
MANY = 10007
"""What a count that only data tells is compared as."""


@contextlib.contextmanager
def counts_are_large(mode: FakeTensorMode) -> Iterator[None]:
    """Where an operator asks whether a count that only data tells is zero, or one, a trace goes on as for many; that it does is a
    fact (`facts_of_data`). What the count is stays unknown."""
    env: Any = mode.shape_env
    if env not in _counts:
        _counts[env], env.create_unbacked_symint = {}, functools.partial(_new_count, env)
    before, env.evaluate_expr = env.evaluate_expr, functools.partial(_evaluated, env)
    try:
        yield
    finally:
        env.evaluate_expr = before


def _evaluated(env: Any, asked: Any, *args: Any, **options: Any) -> Any:
    truth = isinstance(asked, sympy.Rel | sympy.logic.boolalg.BooleanFunction)
    env.real_tensor_prop_unbacked_vals = _counts[env] if truth else {}
    try:
        return ShapeEnv.evaluate_expr(env, asked, *args, **options)
    finally:
        env.real_tensor_prop_unbacked_vals = {}


def _new_count(env: ShapeEnv, *args: Any, **options: Any) -> torch.SymInt:
    number = ShapeEnv.create_unbacked_symint(env, *args, **options)
    _counts[env][number.node.expr] = sympy.Integer(MANY)
    return number


_counts: weakref.WeakKeyDictionary[ShapeEnv, dict[Any, sympy.Integer]] = weakref.WeakKeyDictionary()
"""The counts of a trace, and what they are taken to be."""


def about_picked_places(error: Exception) -> str:
    """Such an error in words that a user can do something about."""
    condition = re.search(r"expression (.+?) \(unhinted", str(error))
    asked = in_python(condition[1]) if condition else ""
    asked = asked and (f" (whether {asked})" if re.search("[=<>]", asked) else f" (the number {asked})")
    if "Size-like symbols: none" in str(error) or "PendingUnbackedSymbolNotFound" in str(error):
        return (
            f"what is computed depends on a value that is known only when the step runs{asked}; select by torch.where or a "
            "mask instead"
        )
    return (
        f"what is computed depends on how many places a mask picks{asked}; weight by the mask in the place of picking, as "
        "(x * mask).sum() / mask.sum() does"
    )


def in_python(fact: str) -> str:
    """A fact about what data tells, as sympy writes it, in Python: `Eq(u0, 1)` is `n == 1`."""
    for name, sign in (("Eq", "=="), ("Ne", "!="), ("FloatTrueDiv", "/")):
        fact = re.sub(rf"\b{name}\(([^(),]+(?:\([^()]*\))?), ([^(),]+(?:\([^()]*\))?)\)", rf"\1 {sign} \2", fact)
    fact = (
        re.sub(r"\bToFloat\((\w+)\)", r"\1", fact)
        .replace("TruncToInt(", "int(")
        .replace("Max(", "max(")
        .replace("Min(", "min(")
    )
    names = list(dict.fromkeys(re.findall(r"\b(?:zuf|zf|u)\d+\b", fact)))
    for i, name in enumerate(names):
        fact = re.sub(rf"\b{name}\b", "n" if len(names) == 1 else f"n{i + 1}", fact)
    return fact


def facts_of_data(mode: FakeTensorMode) -> set[Any]:
    """Facts about sizes that only data tells on which the trace relied, as sympy expressions."""
    env = mode.shape_env
    return set() if env is None else _deferred(env) - _certain.get(env, set())


def _deferred(env: ShapeEnv) -> set[Any]:
    return {entry.expr for found in env.deferred_runtime_asserts.values() for entry in found}


_certain: weakref.WeakKeyDictionary[ShapeEnv, set[Any]] = weakref.WeakKeyDictionary()
"""Facts that operators see to themselves: bincount(x, minlength=5) has five places or more."""


of_a_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a value lives inside of vmap, grad or jvp, of which nothing is known once the transform has ended."""


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN off; torch.backends.mkldnn.flags would also touch TF32 settings, and warn about them."""
    with ONE_AT_A_TIME:  # two threads at once would put back what the other one has switched off
        kept = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(kept)


def traced_size(size: int | torch.SymInt, *, extra: int = 0) -> int:
    """A size as a number; a symbolic one by what it was traced with (each symbol `extra` more), without fixing it to that."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    env, expression = size.node.shape_env, size.node.expr
    values = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # renamed between versions

    def value(symbol: Any) -> int:
        return (int(values[symbol]) if symbol in values else _most(env, symbol)) + extra

    return int(expression.xreplace({symbol: value(symbol) for symbol in expression.free_symbols}))


def _most(env: ShapeEnv, symbol: Any) -> int:
    """The largest that a size can be which only data tells; 1 where that is not known."""
    return traced_size(_picked_from.get(env, {}).get(symbol, 1))


_picked_from: weakref.WeakKeyDictionary[ShapeEnv, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Symbol of a size that only data tells -> among how many places it counts: a mask picks no more than it has."""


def note_picked_sizes() -> None:
    """Have torch's rules for tensors without data tell of the sizes that they make up."""
    from torch._subclasses.fake_impls import op_implementations_dict as rules

    aten = torch.ops.aten
    made_by = (aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount)
    for operator in (packet.default for packet in made_by):
        if operator in rules:
            rules[operator] = _noting_sizes(rules[operator])


def _noting_sizes(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def noting(mode: FakeTensorMode, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        env = mode.shape_env
        before = set() if env is None else _deferred(env)
        made = rule(mode, func, tensor, *args, **kwargs)
        if env is not None:
            _certain.setdefault(env, set()).update(_deferred(env) - before)
        first = made[0] if isinstance(made, tuple) else made
        for size in first.shape:
            if isinstance(size, torch.SymInt) and free_unbacked_symbols(size) and size.node.expr.is_symbol:
                _picked_from.setdefault(env, {})[size.node.expr] = tensor.numel()
        return made

    return noting


def saved_tensor_hooks() -> Any:
    """The innermost saved_tensors_hooks in force (an activation checkpoint is one); None without any."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def in_function_transform() -> bool:
    """Whether torch.func (grad, vmap, jvp) or forward-mode autograd is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def in_vmap() -> bool:
    """Whether torch.func.vmap is at work, at any level."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def in_function_mode(kind: type) -> bool:
    """Whether a TorchFunctionMode of this class is in force."""
    return any(isinstance(mode, kind) for mode in torch.overrides._get_current_function_mode_stack())


def grow_segments() -> bool:
    """From now on CUDA's allocator extends its segments instead of adding new ones, so what it reserves is what is used.

    False where this torch cannot change that any more.
    """
    names = ((torch._C, "_accelerator_setAllocatorSettings"), (torch.cuda.memory, "_set_allocator_settings"))
    for holder, name in names:  # the newer one first: the other warns there
        try:
            getattr(holder, name)("expandable_segments:True")
            return True
        except (AttributeError, RuntimeError, ValueError):
            continue
    return False


def bytes_on_card(device: torch.device) -> int | None:
    """What the driver says this process holds of the card, context and all; None where it tells nobody.

    It needs nvidia-ml-py, and in some containers the driver knows processes by other numbers.
    """
    try:
        told = torch.cuda.list_gpu_processes(device)
    except Exception:  # a driver that refuses has errors of its own
        return None
    mine = re.search(rf"process\s+{os.getpid()} uses\s+([\d.]+) MB", told)
    return int(float(mine[1]) * 2**20) if mine else None


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that counts the writes to another: its `_version` is that of the other."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # the count stays
    return counter


def counts_writes_to(counter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a counter is that of a tensor; two tensors of one storage need not have one (`unsafe_chunk`, `.data`)."""
    before = tensor._version
    if counter._version != before:
        return False
    torch.autograd.graph.increment_version(tensor)
    try:
        return counter._version != before
    finally:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (before,))
