"""One region -> one callable, by TorchInductor's post-autograd entry `compile_fx_inner`.

In goes a region's FX graph of core operators; out comes a function that takes a list of inputs, may empty it, and
returns the outputs with exactly the strides of the trace (the other regions were traced with those). Three steps:

1. retrace with Inductor's decompositions and the package's own (`ops.DECOMPOSITIONS`: dropout becomes arithmetic
   that fuses);
2. the joint-graph passes that `compile_fx` runs for a graph without backward (constant folding, padded matrix
   products);
3. `compile_fx_inner`, whose FxGraphCache finds the compiled code on disk in later processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from wholestep.errors import CompilerMissing, one_line
from wholestep.graph.strides import inverse, memory_order
from wholestep.graph.training_graph import tensors_in
from wholestep.lower import region_cache
from wholestep.lower.driver import build_driver
from wholestep.lower.interpret import constants_of
from wholestep.lower.overlap import vector_isa
from wholestep.lower.regions import Region
from wholestep.lower.statements import statement_of

aten = torch.ops.aten

INDUCTOR_CONFIG: dict[str, Any] = {
    # Random operators other than `ws::` ones must draw what eager draws.
    "fallback_random": True,
    # The whole step is one CUDA graph (cuda_graph.py), never one per region.
    "triton.cudagraphs": False,
    "graph_partition": False,
}


@dataclasses.dataclass
class Compiled:
    """What runs in place of a region."""

    function: Callable[[list[Any]], Sequence[Any]]
    seconds: float
    cached: bool
    """Whether the code was found on disk, or in this process."""
    note: str = ""
    """Why the region runs uncompiled; empty when it is compiled."""


# Two Steps of one process (a GAN, a second batch shape) often share layers.
_in_process: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()


def require_compiler(regions: Sequence[Region]) -> None:
    """Inductor needs a C++ compiler for the CPU; without one every region would fail, one by one."""
    if not on_cpu(regions) or not regions:
        return
    names = [os.environ.get("CXX"), "g++", "clang++", "c++", "cl"]
    if not any(name and shutil.which(name) for name in names):
        raise CompilerMissing(
            "backend 'inductor' needs a C++ compiler on the CPU and none was found (g++, clang++, $CXX)",
            hint="install g++, or use backend='interpret'",
        )


def on_cpu(regions: Sequence[Region]) -> bool:
    """Whether no tensor of the regions is elsewhere."""
    devices = {t.device.type for r in regions for n in (*r.reads, *r.body) for t in tensors_in(n.meta.get("val"))}
    return not devices - {"cpu"}


def forget_compiled() -> None:
    """Compile again what this process has compiled before."""
    _in_process.clear()


def compile_region(region: Region) -> Compiled:
    """Compile, or fall back to calling the operators one by one with the reason in `note`."""
    # Not the signature alone: the user may have changed matmul precision or determinism between two compilations.
    key = f"{region.signature} {region_cache.environment()}"
    found = _in_process.get(key)
    if found is not None:
        return found
    started = time.perf_counter()
    hits = _cache_hits()
    module = region.build_module()
    try:
        function = _compiled(module, region.signature)
        compiled = Compiled(function, time.perf_counter() - started, _cache_hits() > hits)
    except Exception as error:
        note = f"runs uncompiled, Inductor failed ({one_line(error)})"
        compiled = Compiled(_uncompiled(module), time.perf_counter() - started, False, note)
    _in_process[key] = compiled
    return compiled


def _cache_hits() -> int:
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def _uncompiled(module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """The region as a flat function of operator calls."""
    nodes = list(module.graph.nodes)
    results = nodes[-1].args[0]
    statements = [statement_of(node, exactly=node in results) for node in nodes if node.op == "call_function"]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    constants = constants_of(module.graph, module)
    return build_driver(placeholders, statements, results, constants, consume=True).function


def _compiled(module: fx.GraphModule, signature: str) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor tries padded matrix products out on tensors of their sizes; where memory is short, it does without."""
    from torch._inductor import config

    with contextlib.suppress(torch.OutOfMemoryError):
        return _compile(module, signature)
    with config.patch(shape_padding=False):
        return _compile(module, signature)


def _compile(module: fx.GraphModule, signature: str) -> Callable[[list[Any]], Sequence[Any]]:
    from torch._inductor import config

    given = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    symbolic = _symbolic_mode(module)
    mode = symbolic or FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with config.patch(_known_settings(config)), _compiling(mode):
        compiled = None if symbolic else region_cache.load(signature, given)
        if compiled is None:
            on_cpu = any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in given)
            if on_cpu:
                vector_isa()
            compiled = _compile_anew(module, [_fresh(value, mode) for value in given], mode)
            if symbolic is None:
                region_cache.remember(signature, compiled, on_cpu=on_cpu)
    # The object's own __call__ does bookkeeping for torch.compile; the callable inside is the generated code.
    return getattr(compiled, "current_callable", None) or compiled


def _compile_anew(module: fx.GraphModule, values: list[Any], mode: FakeTensorMode) -> Any:
    from torch._inductor import compile_fx

    wanted = [node.meta["val"] for node in _outputs(module)]
    lowered = _decompose(module, values, mode)
    lowered = _joint_passes(lowered, values)
    _keep_strides(lowered, wanted, mode)
    output = next(iter(reversed(lowered.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(wanted)))
    return compile_fx.compile_fx_inner(lowered, values, is_inference=True)


def _known_settings(config: Any) -> dict[str, Any]:
    """Our settings, less those this version of torch does not have."""
    known = config.get_config_copy()
    return {name: value for name, value in INDUCTOR_CONFIG.items() if name in known}


@contextlib.contextmanager
def _compiling(mode: FakeTensorMode) -> Iterator[None]:
    """The surroundings in which `compile_fx` itself compiles."""
    from torch._inductor.virtualized import V

    with V.set_fake_mode(mode), tracing(TracingContext(mode)), enable_python_dispatcher(), torch.no_grad():
        yield


def _symbolic_mode(module: fx.GraphModule) -> FakeTensorMode | None:
    """The mode that owns the region's symbolic sizes, if it has any. Static regions get a new mode, which has the shape
    environment that FxGraphCache asks for; graphs read from disk come without one."""
    for node in module.graph.nodes:
        for tensor in tensors_in(node.meta.get("val")):
            if isinstance(tensor, FakeTensor) and tensor._has_symbolic_sizes_strides:
                return tensor.fake_mode
    return None


def _fresh(value: Any, mode: FakeTensorMode) -> Any:
    """A fake of its own for each input: a graph read from the cache shares one between all values of a shape."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _outputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(next(iter(reversed(module.graph.nodes))).args[0])  # type: ignore[arg-type]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's own and the package's, which go first."""
    from torch._inductor.decomposition import select_decomp_table

    from wholestep.ops import DECOMPOSITIONS

    return {**select_decomp_table(), **DECOMPOSITIONS}


def _decompose(module: fx.GraphModule, values: list[Any], mode: FakeTensorMode) -> fx.GraphModule:
    from wholestep.ops import IN_ORDER

    table = decompositions()
    table |= {target: _first_of(ordered, table.get(target)) for target, ordered in IN_ORDER.items()}
    with mode:
        lowered = make_fx(fx.Interpreter(module).run, decomposition_table=table)(*values)
    lowered.graph.eliminate_dead_code()
    lowered.recompile()
    return lowered


def _first_of(decomposition: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    """The first of two that has an answer; with none, the operator stays."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        found = decomposition(*args, **kwargs)
        return other(*args, **kwargs) if found is NotImplemented and other is not None else found

    return decompose


def _joint_passes(lowered: fx.GraphModule, values: list[Any]) -> fx.GraphModule:
    from torch._inductor import compile_fx

    if any(
        free_unbacked_symbols(tensor) for node in lowered.graph.nodes for tensor in tensors_in(node.meta.get("val"))
    ):
        return lowered  # they ask whether a size is 0 or 1 which only data tells (torch 2.13)
    passes = compile_fx._recursive_joint_graph_passes
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    options = {"input_device": device} if "input_device" in inspect.signature(passes).parameters else {}
    result = passes(lowered, **options)
    return lowered if result is None else result


def _keep_strides(lowered: fx.GraphModule, wanted: list[Any], mode: FakeTensorMode) -> None:
    """Give every output the strides it had when the whole step was traced; decompositions may have changed them."""
    output = next(iter(reversed(lowered.graph.nodes)))
    results = list(output.args[0])  # type: ignore[arg-type]
    for index, (node, value) in enumerate(zip(results, wanted, strict=True)):
        now = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(now, torch.Tensor) and _significant_strides(now) != _significant_strides(value):
            results[index] = _restride(lowered.graph, output, node, value, mode)
    output.args = (tuple(results),)
    lowered.recompile()


def _significant_strides(tensor: torch.Tensor) -> list[str]:
    """Strides of the dimensions that have more than one entry; the others decide nothing."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [str(stride) for size, stride in pairs if not isinstance(size, int) or size != 1]


def _restride(graph: fx.Graph, before: fx.Node, node: fx.Node, value: torch.Tensor, mode: FakeTensorMode) -> fx.Node:
    """A dense copy of `node` whose dimensions are laid out in the order of `value`'s strides."""
    order = memory_order(value)
    contiguous = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(before), mode:
        for target, args, kwargs in (
            (aten.permute.default, (order,), {}),
            (aten.clone.default, (), contiguous),
            (aten.permute.default, (inverse(order),), {}),
        ):
            made = graph.call_function(target, (node, *args), kwargs)
            made.meta["val"] = target(node.meta["val"], *args, **kwargs)
            node = made
    if _significant_strides(node.meta["val"]) != _significant_strides(value):
        raise ValueError(f"an output needs strides {tuple(value.stride())} for shape {tuple(value.shape)}")
    return node
