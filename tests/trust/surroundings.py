"""All that a training's code can reach, as a comparable view: taken before `wholestep.compile` and again after it."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import operator
import os
import random
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
import torch._dynamo
from tests.trust.case import Made, modules_of
from tests.trust.compare import kept
from torch import nn

MODULE_HOOKS = sorted(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs")))
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
GLOBAL_HOOKS = sorted(
    name for name in vars(nn.modules.module) if name.startswith("_global_") and name.endswith("_hooks")
)
FUNCTIONS = {"random": random, "numpy.random": np.random, "torch": torch, "torch.nn.functional": nn.functional}
OPAQUE = (nn.Module, type, types.ModuleType, logging.Logger, weakref.WeakKeyDictionary)
"""Not taken apart: modules have a view of their own, and loggers and weak dictionaries hold caches that reading fills."""
DEEPEST = 6


def surroundings(part: Made, made: Made) -> dict[str, Any]:
    """What must not change while `part` of the training `made` is compiled."""
    modules = [*modules_of(part.model), *_reached_modules(part.loss_fn)]
    optimizer = part.optimizer
    return kept(
        {
            "modules": [_module_view(module) for module in modules],
            "optimizer": None if optimizer is None else [optimizer.state_dict(), sorted(vars(optimizer))],
            "loss_fn": view(part.loss_fn),
            "batch": view(made.batches[0]),
            "state": made.state(),
            "random": [str(random.getstate()), np.random.get_state()[1:], torch.get_rng_state()],
            "threads": {thread.name: thread.ident for thread in threading.enumerate() if not _compiles(thread)},
            "warnings filters": [str(entry) for entry in warnings.filters],
            "process": process_wide(),
        }
    )


def _compiles(thread: threading.Thread) -> bool:
    """One of the threads that Inductor keeps, and adds to as it has more to compile; or ours that imports it, and ends."""
    if thread.name == "wholestep-warm-up":
        return True
    module = sys.modules.get("torch._inductor.async_compile")
    if (
        module is None or not module.AsyncCompile.pool.cache_info().currsize
    ):  # asking for a pool would make one, or fail
        return False
    return thread in module.AsyncCompile.pool()._threads


def process_wide() -> dict[str, Any]:
    """What all threads share: a training that ends, whichever way, leaves it as it was."""
    return {
        "functions": {name: _functions_of(module) for name, module in FUNCTIONS.items()},
        "hooks of all modules": {name: _keys_and_ids(getattr(nn.modules.module, name)) for name in GLOBAL_HOOKS},
        "default dtype": str(torch.get_default_dtype()),
        "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "autocast": [
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_autocast_dtype("cpu"),
        ],
        "modes": [
            torch._C._get_torch_function_state(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._functorch.get_dynamic_layer_stack_depth(),
            torch.is_anomaly_enabled(),
        ],
        "dispatcher": [
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
            torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
            torch.autograd.forward_ad._current_level,
            torch._C._is_fwd_grad_enabled(),
            torch._C._functorch.get_inplace_requires_grad_allowed(),
            torch.autograd._profiler_enabled(),
        ],
        "deterministic": [torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory],
        "backends": [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch._C._get_mkldnn_enabled()],
        "precision": [torch.get_float32_matmul_precision(), torch.backends.mha.get_fastpath_enabled()],
        "validation": torch.distributions.Distribution._validate_args,
        "interpreter": [sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold(), sys.gettrace(), sys.excepthook],
        "surroundings": [os.getcwd(), dict(os.environ), str(signal.getsignal(signal.SIGINT)), np.geterr()],
        "classes": {
            cls.__name__: _members_of(cls) for cls in (nn.Module, torch.Tensor, nn.Parameter, torch.optim.Optimizer)
        },
        "stance of torch.compile": str(torch._dynamo.eval_frame._stance),
        "settings of torch.compile": {
            k: str(sorted(v) if isinstance(v, set) else v) for k, v in torch._dynamo.config.get_config_copy().items()
        },
    }


# Long lists of numbers are one text each: they are compared before and after every training.


def _functions_of(module: Any) -> str:
    own = vars(module)
    return str([id(own[name]) for name in sorted(own) if not name.startswith("_") and callable(own[name])])


def _members_of(cls: type) -> str:
    own = vars(cls)
    return str([id(own[name]) for name in sorted(own) if not name.startswith("__")])


def _keys_and_ids(table: Any) -> list[Any]:
    return [[key, id(hook)] for key, hook in (table or {}).items()]


def _module_view(root: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"state_dict": dict(root.state_dict())}
    for path, module in root.named_modules(remove_duplicate=False):
        own = vars(module)
        found[path or "root"] = {
            "identity": [id(module), type(module).__name__, id(inspect.getattr_static(type(module), "forward", None))],
            "attributes": sorted(own),
            "values": [view(value) for name, value in sorted(own.items()) if not name.startswith("_")],
            "training": module.training,
            "hooks": {name: _keys_and_ids(own.get(name)) for name in MODULE_HOOKS},
        }
    for name, p in root.named_parameters(remove_duplicate=False):
        hooks = [_keys_and_ids(getattr(p, table, None)) for table in TENSOR_HOOKS]
        grad = p.grad if p.grad is None else [id(p.grad), p.grad]
        found[f"parameter {name}"] = [id(p), p.data_ptr(), p.requires_grad, grad, hooks, sorted(vars(p))]
    return found


def view(value: Any, depth: int = 0, seen: frozenset[int] = frozenset()) -> Any:
    """Plain containers, objects and functions taken apart, with identities; tensors by identity and content."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    here = [type(value).__name__, id(value)]
    if isinstance(value, torch.Tensor):
        return [*here, value]
    if depth >= DEEPEST or id(value) in seen or isinstance(value, OPAQUE):
        return here
    inside = functools.partial(view, depth=depth + 1, seen=seen | {id(value)})
    if isinstance(value, np.ndarray):
        return [*here, value]
    if isinstance(value, dict):
        return [*here, [[view(key, DEEPEST), inside(entry)] for key, entry in value.items()]]
    if isinstance(value, types.FunctionType):
        kept_with = [value.__defaults__, value.__kwdefaults__, vars(value)]
        return [*here, id(value.__code__), [inside(entry) for entry in kept_with], [inside(c) for c in _cells(value)]]
    if isinstance(value, types.MethodType):
        return [type(value).__name__, inside(value.__self__), inside(value.__func__)]  # a method is made at each access
    if isinstance(value, functools.partial):
        return [*here, inside(value.func), inside(value.args), inside(value.keywords)]
    if isinstance(value, types.GeneratorType):
        return [*here, -1 if value.gi_frame is None else value.gi_frame.f_lasti]
    if isinstance(value, Iterator):
        return [*here, operator.length_hint(value, -1)]
    if isinstance(value, Collection):  # lists, tuples, sets, deques
        return [*here, [inside(entry) for entry in value]]
    return [*here, [[name, inside(entry)] for name, entry in getattr(value, "__dict__", {}).items()]]


def _cells(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append("empty")
    return found


def _reached_modules(loss_fn: Any) -> list[nn.Module]:
    """Modules in the loss's closure: teachers, target networks."""
    holders = _cells(loss_fn) if isinstance(loss_fn, types.FunctionType) else [loss_fn]
    inner = [entry for holder in holders if isinstance(holder, list | tuple) for entry in holder]
    inner += [entry for holder in holders if isinstance(holder, dict) for entry in holder.values()]
    return [entry for entry in [*holders, *inner] if isinstance(entry, nn.Module)]
