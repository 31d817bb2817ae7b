"""Automatic mixed precision as a rewrite of the captured step.

In: a graph captured in float32, without autocast. Out: the same graph with matrix products, convolutions and attention - and
their backward - in bf16 or fp16, and with everything that sums many terms or leaves the range of a narrow type in float32 (the
table is `ops/aten/precision.py`). Why a pass, where autocast exists: autocast sees one operator at a time and never the backward. A
pass casts each value once, casts a weight again in the backward instead of keeping its copy, lets sums read narrow and
accumulate wide, and takes a precision per module.

The rewrite goes through the graph once, in order. Each node's arguments are brought to the types its rule asks for, then its
value is computed again on fake tensors, so `meta["val"]` is what will run. A node that cannot run in other types than it was
captured in is given those. Gradients, losses, results and everything the update reads have the types they were captured in.

fp16 here scales no loss: that is `compile(precision="fp16")`.
"""

from __future__ import annotations

import operator
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import fx

from wholestep.errors import BadOption, WholestepWarning, did_you_mean, first_line
from wholestep.graph.check import where
from wholestep.graph.layers import holds_module, without_calls
from wholestep.graph.training_graph import Role, TrainingGraph, module_of, phase_of
from wholestep.graph.views import WHOLE_VIEWS
from wholestep.ops.aten.precision import precision_of
from wholestep.ops.record import Precision, Rule
from wholestep.passes.fx_edit import sweep, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_SOFTMAX_BACKWARD = (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)


@compiler_pass(numerics="rounding")
def amp(
    graph: TrainingGraph,
    *,
    precision: str = "bf16",
    modules: Mapping[str, str] | None = None,
    weights: Literal["recast", "reuse"] = "recast",
) -> TrainingGraph:
    """mm(x, w) => mm(bf16(x), bf16(w)), and so on for the whole step.

    Args:
        precision: "bf16" or "fp16", for all that the table calls low.
        modules: module path or pattern (`lm_head`, `*.attn`) -> precision of it and of all inside; the last that fits wins.
        weights: "recast" casts a weight again in the backward, so that its narrow copy dies after the forward; "reuse" keeps it.
    """
    return _Rewrite(graph, precision, dict(modules or {}), weights).run()


class _Rewrite:
    """One application of the pass."""

    def __init__(self, graph: TrainingGraph, precision: str, modules: dict[str, str], weights: str) -> None:
        for name in (precision, *modules.values()):
            if name not in PRECISIONS:
                raise BadOption(f"amp: precision {name!r}", hint=f"use one of {', '.join(PRECISIONS)}")
        if weights not in ("recast", "reuse"):
            raise BadOption(f"amp: weights={weights!r}", hint="use 'recast' or 'reuse'")
        self.graph, self.modules = graph, modules
        parameters = graph.indices(Role.PARAMETER) if weights == "recast" else []
        self.recast = {graph.placeholders[i] for i in parameters}
        self.default = PRECISIONS[precision]
        self.paths: dict[str | None, torch.dtype] = {}
        self.captured = {node: node.meta.get("val") for node in graph.graph.nodes}
        self.casts: dict[tuple[fx.Node, torch.dtype, str | None], fx.Node] = {}
        self.stayed: list[str] = []
        """Operators that could not run in the types of their rule."""
        self.gradients: dict[str, list[str]] = defaultdict(list)
        for key, name in graph.gradients.items():
            self.gradients[name].append(key)
        self._refuse_unknown_patterns()

    def run(self) -> TrainingGraph:
        for node in list(self.graph.operations()):
            self._rewrite(node)
            if node.name in self.gradients:
                self._restore_gradient(node)
        output = self.graph.output_node
        values = [self._cast(v, self._captured_dtype(v), output) for v in self.graph.output_values]
        output.args = (tuple(values),)
        self._follow_boundaries()
        sweep(self.graph)
        if self.stayed:
            text = f"amp: {len(self.stayed)} operators stay as captured, the first is {self.stayed[0]}"
            warnings.warn(text, WholestepWarning, stacklevel=3)
        return self.graph

    def _follow_boundaries(self) -> None:
        """The output of a module that is read only through its cast is, from now on, that cast."""
        self.graph.graph.eliminate_dead_code()
        alive = {node.name for node in self.graph.graph.nodes}
        copies = {value.name: made.name for (value, _, _), made in self.casts.items()}
        followed = {
            path: name if name in alive else copies.get(name, name) for path, name in self.graph.boundaries.items()
        }
        self.graph.boundaries = {path: name for path, name in followed.items() if name in alive}

    # ---- one node ----

    def _rewrite(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr,index]
            return
        entry = precision_of(node)
        rule, low = entry.rule, self._precision_of(module_of(node))
        if rule == "low" and low is torch.float32:
            rule = "wide"
        kept = (node.args, dict(node.kwargs))
        try:
            self._apply(node, entry, rule, low)
            self._propagate(node, changed=(node.args, dict(node.kwargs)) != kept)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            self.stayed.append(f"{where(node)}: {first_line(error, 100)}")
            node.args, node.kwargs = kept  # type: ignore[assignment]
            self._apply(node, entry, "keep", low)
            self._propagate(node, changed=True)

    def _apply(self, node: fx.Node, entry: Precision, rule: Rule, low: torch.dtype) -> None:
        """Bring the arguments of a node to the types of its rule."""
        if rule == "given":
            return
        if rule == "like":
            self._match_like(node)
            return
        if rule == "total":
            self._match_sum(node)
            return
        concerned = node.args[entry.first : entry.positions]
        rest = () if entry.positions is None else node.args[entry.positions :]
        if rule == "keep":
            wanted = None
        elif rule in ("low", "wide"):
            wanted = low if rule == "low" else torch.float32
        elif rule == "saved":
            wanted = self._widest(node.args[entry.saved])
        else:
            wanted = self._widest(concerned if entry.positions is not None else (node.args, node.kwargs))
        scalars = rule in ("low", "wide", "saved")
        node.args = (
            *node.args[: entry.first],
            *fx.map_arg(concerned, lambda a: self._argument(a, wanted, node, scalars)),
            *(fx.map_arg(rest, lambda a: self._argument(a, None, node, True)) if rule == "keep" else rest),
        )
        if entry.positions is None:
            node.kwargs = fx.map_arg(dict(node.kwargs), lambda a: self._argument(a, wanted, node, scalars))
        if node.target in _SOFTMAX_BACKWARD and wanted is torch.float32:
            node.update_arg(3, torch.float32)

    def _argument(self, value: fx.Node, wanted: torch.dtype | None, user: fx.Node, scalars: bool) -> fx.Node:
        """`value` in the type `wanted` (None: as captured); a number in a 0-d tensor has no say in types and stays."""
        tensor = tensor_of(value)
        if tensor is None or tensor.dtype not in _CASTABLE:
            return value
        if wanted is None:
            return self._cast(value, self._captured_dtype(value), user)
        return value if tensor.dim() == 0 and not scalars else self._cast(value, wanted, user)

    def _widest(self, arguments: Any) -> torch.dtype | None:
        """The widest type among the arguments: of those with dimensions, or of all where none has any."""
        found: list[torch.Tensor] = []
        fx.map_arg(arguments, lambda a: found.append(tensor_of(a)) if tensor_of(a) is not None else None)  # type: ignore[arg-type,func-returns-value]
        floating = [t for t in found if t.is_floating_point()]
        if any(t.dtype not in _CASTABLE for t in floating):
            return None  # float64 or float8: the model's own business
        types = {t.dtype for t in floating if t.dim() > 0} or {t.dtype for t in floating}
        return next(iter(types)) if len(types) == 1 else torch.float32 if types else None

    def _match_like(self, node: fx.Node) -> None:
        before, now = self.captured.get(node.args[0]), tensor_of(node.args[0])  # type: ignore[call-overload,arg-type]
        if isinstance(before, torch.Tensor) and now is not None and node.kwargs.get("dtype") == before.dtype:
            node.kwargs = {**node.kwargs, "dtype": now.dtype}

    def _match_sum(self, node: fx.Node) -> None:
        """sum(x) of a narrow x accumulates in float32 anyway; asked for, it also returns that."""
        tensor = tensor_of(node.args[0])
        if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16) and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}

    def _propagate(self, node: fx.Node, *, changed: bool) -> None:
        """Compute the value of a node anew on fake tensors, unless nothing about its arguments changed."""
        sources = node.all_input_nodes
        if not changed and all(s.meta.get("val") is self.captured.get(s, self) for s in sources):
            return
        mode = next((t.fake_mode for s in sources if isinstance(t := tensor_of(s), torch.Tensor)), None)  # type: ignore[attr-defined]
        if mode is None or not callable(node.target):
            return
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda a: a.meta["val"])
        with mode:
            node.meta["val"] = node.target(*args, **kwargs)

    # ---- casts ----

    def _cast(self, value: Any, dtype: torch.dtype | None, user: fx.Node, owner: fx.Node | None = None) -> Any:
        """`value` in another type, made once (per phase, for a weight), as near to its origin as views allow.

        New nodes stand before `user`, and belong to the phase and module of `owner` (of `user`, where none is given).
        """
        tensor = tensor_of(value)
        if tensor is None or dtype is None or tensor.dtype == dtype or tensor.dtype not in _CASTABLE:
            return value
        phase = phase_of(user) if _origin(value) in self.recast else None
        if (value, dtype, phase) not in self.casts:
            if value.op == "call_function" and value.target in WHOLE_VIEWS:
                # in front of the view, to the value it looks at: the next reader of that value shares the cast
                source = self._cast(value.args[0], dtype, user, owner)
                made = self._insert(value.target, (source, *value.args[1:]), dict(value.kwargs), user)
            else:
                made = self._insert(aten._to_copy.default, (value,), {"dtype": dtype}, user)
            made.meta["custom"] = dict((owner or user).meta.get("custom") or {"phase": "update"})
            self.casts[value, dtype, phase] = made
        return self.casts[value, dtype, phase]

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], user: fx.Node) -> fx.Node:
        with self.graph.graph.inserting_before(user):
            node = self.graph.graph.call_function(target, args, kwargs)
        source = tensor_of(args[0])
        assert source is not None
        with source.fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(
                *fx.map_arg(args, lambda a: a.meta["val"]), **fx.map_arg(kwargs, lambda a: a.meta["val"])
            )
        return node

    def _restore_gradient(self, node: fx.Node) -> None:
        """A gradient has the type it was captured in; the table names the node that has it."""
        wanted, now = self._captured_dtype(node), tensor_of(node)
        if now is None or wanted is None or now.dtype == wanted:
            return
        made = self._cast(node, wanted, node.next, owner=node)
        self.graph.gradients.update(dict.fromkeys(self.gradients[node.name], made.name))

    def _captured_dtype(self, value: Any) -> torch.dtype | None:
        before = self.captured.get(value) if isinstance(value, fx.Node) else None
        return before.dtype if isinstance(before, torch.Tensor) else None

    # ---- modules ----

    def _precision_of(self, path: str | None) -> torch.dtype:
        if path not in self.paths:
            called = without_calls(path or "")
            fitting = [name for place, name in self.modules.items() if holds_module(place, called)]
            self.paths[path] = PRECISIONS[fitting[-1]] if fitting else self.default
        return self.paths[path]

    def _refuse_unknown_patterns(self) -> None:
        paths = {without_calls(module_of(node) or "") for node in self.graph.operations()}
        known = sorted(
            {".".join(path.split(".")[: i + 1]) for path in paths for i in range(path.count(".") + 1)} - {""}
        )
        for place in self.modules:
            if not any(holds_module(place, path) for path in paths):
                hint = did_you_mean(place, known, f"paths look like {', '.join(known[:3])}")
                raise BadOption(f"amp: no module of the captured step fits {place!r}", hint=hint)


def _origin(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while node.op == "call_function" and node.target in WHOLE_VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
