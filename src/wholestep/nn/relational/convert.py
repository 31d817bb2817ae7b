"""convert_relational(model): torch_geometric's relational layers change into ours, with the same Parameter objects.

In: any model. Out: a Report of what was replaced, what was left, and why. At the first call of a layer both forms get the same
inputs; if outputs or gradients differ, or ours refuses the inputs, the original comes back, its output is returned, and the report
says so. A call that is being traced compares nothing: call the model once before `wholestep.compile`.

HeteroConv is left: its parts are layers for one relation each.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wholestep import compat
from wholestep.errors import BadOption, WholestepError
from wholestep.nn.relational.hgt import HGTConv
from wholestep.nn.relational.rgat import RGATConv
from wholestep.nn.relational.rgcn import RGCNConv
from wholestep.relational import RelGraph

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the largest value of a tensor."""


@dataclass
class Report:
    """What `convert_relational` did, by module path; a layer whose first call differs moves from `replaced` to `left`."""

    replaced: dict[str, str] = field(default_factory=dict)
    """Path -> its class."""
    left: dict[str, str] = field(default_factory=dict)
    """Path -> why."""

    def __str__(self) -> str:
        lines = [f"relational layers: {len(self.replaced)} replaced, {len(self.left)} left"]
        lines += [f"  replaced {path or 'the model'}: {kind}" for path, kind in self.replaced.items()]
        return "\n".join(lines + [f"  left     {path or 'the model'}: {reason}" for path, reason in self.left.items()])


def convert_relational(model: nn.Module) -> Report:
    """Replace RGCNConv, FastRGCNConv, RGATConv and HGTConv of torch_geometric inside of `model`."""
    if not isinstance(model, nn.Module):
        raise BadOption(f"convert_relational takes a torch.nn.Module, got {type(model).__name__}")
    report = Report()
    if "torch_geometric" not in sys.modules:  # then there is nothing of it in the model
        return report
    for path, module in list(model.named_modules()):
        kind = _kind(module)
        if kind == "HeteroConv":
            report.left[path] = "its parts are layers for one relation each"
        elif kind in _MADE:
            made = _refusal(path, module) or _made(kind, module)
            if isinstance(made, str):
                report.left[path] = made
            else:
                _put(model, module, made)
                report.replaced[path] = kind
                made.__dict__["forward"] = _FirstCall(model, path, module, made, report)
    return report


# ---- which ----


def _kind(module: nn.Module) -> str:
    kind = type(module)  # a subclass may compute something else
    return kind.__name__ if kind.__module__.startswith("torch_geometric.nn.conv.") else ""


def _refusal(path: str, module: nn.Module) -> str | None:
    if not path:
        return "it is the model itself: nothing holds it that could hold another"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        return "in_channels=-1: its parameters are not made before the first call"
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    if hooks:
        return f"it has {hooks[0].strip('_').replace('_', ' ')}"
    if getattr(module, "explain", None):
        return "it is being explained"
    return None


def _made(kind: str, module: Any) -> nn.Module | str:
    """Ours, with the parameters of the original; or why not."""
    try:
        made = _MADE[kind](module)
    except WholestepError as error:
        return str(error)
    ours, theirs = dict(made.named_parameters()), dict(module.named_parameters())
    if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
        return "its parameters have other names or shapes than this version of torch_geometric is known to give them"
    for name, parameter in theirs.items():
        holder, _, last = name.rpartition(".")
        made.get_submodule(holder)._parameters[last] = parameter
    return made.train(module.training)


def _rgcn(of: Any) -> nn.Module:
    return RGCNConv(
        of.in_channels, of.out_channels, of.num_relations, of.num_bases, of.num_blocks, of.aggr, of.root is not None, of.is_sorted,
        of.bias is not None, **_passing(of),
    )  # fmt: skip


def _rgat(of: Any) -> nn.Module:
    return RGATConv(
        of.in_channels, of.out_channels, of.num_relations, of.num_bases, of.num_blocks, of.mod, of.attention_mechanism,
        of.attention_mode, of.heads, of.dim, of.concat, of.negative_slope, of.dropout, of.edge_dim, of.bias is not None,
        aggr=of.aggr, **_passing(of),
    )  # fmt: skip


def _hgt(of: Any) -> nn.Module:
    return HGTConv(of.in_channels, of.out_channels, (of.node_types, of.edge_types), of.heads, **_passing(of))


def _passing(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ("flow", "node_dim", "decomposed_layers")}


_MADE: dict[str, Callable[[Any], nn.Module]] = {
    "RGCNConv": _rgcn, "FastRGCNConv": _rgcn, "RGATConv": _rgat, "HGTConv": _hgt,
}  # fmt: skip


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Wherever the model holds it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


# ---- the first call ----


@dataclass
class _FirstCall:
    """Stands as `forward` in a layer of ours until that was called; copied and saved with it."""

    model: nn.Module
    path: str
    theirs: nn.Module
    ours: Any
    report: Report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or _any_fake((args, kwargs)):
            return type(self.ours).forward(self.ours, *args, **kwargs)
        del self.ours.__dict__["forward"]
        given = inspect.signature(self.ours.forward).bind(*args, **kwargs).arguments
        known = _without_graph(self.ours, given)
        try:
            reason = self._difference(given, known)
        except WholestepError as error:
            reason = str(error)
        if reason is None:
            return self.ours.forward(*args, **kwargs)
        _put(self.model, self.ours, self.theirs)
        self.report.left[self.path] = reason
        self.report.replaced.pop(self.path, None)
        return self.theirs(**known)

    def _difference(self, given: dict[str, Any], known: dict[str, Any]) -> str | None:
        """None if both give the same outputs and gradients. Without dropout, and without a trace in anyone's gradients."""
        was = self.ours.training
        try:
            theirs, ours = _outcome(self.theirs.eval(), known), _outcome(self.ours.eval(), given)
        finally:
            self.ours.train(was)
            self.theirs.train(was)
        if theirs.keys() != ours.keys():
            return f"it gives other outputs: {', '.join(sorted(theirs.keys() ^ ours.keys()))}"
        reasons = (_distance(name, ours[name], theirs[name]) for name in theirs)
        return next(filter(None, reasons), None)


def _any_fake(arguments: Any) -> bool:
    return any(isinstance(t, Tensor) and compat.is_fake(t) for t in pytree.tree_leaves(arguments))


def _without_graph(ours: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """A RelGraph as the tensors it was made of: theirs does not take it."""
    if isinstance(given.get("edge_index"), RelGraph):
        index, etype = given["edge_index"].given()
        return {**given, "edge_index": index, "edge_type": etype}
    if isinstance(ours, HGTConv) and isinstance(given["edge_index_dict"], RelGraph):
        return {**given, "edge_index_dict": ours.edges(given["x_dict"], given["edge_index_dict"])}
    return given


def _distance(name: str, found: Tensor, wanted: Tensor) -> str | None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{name} is {found.dtype} of {tuple(found.shape)}, wanted {wanted.dtype} of {tuple(wanted.shape)}"
    most, off = (float(t.abs().max()) if t.numel() else 0.0 for t in (wanted, found - wanted))
    if off <= TOLERANCE.get(wanted.dtype, 0.0) * max(most, 1.0):
        return None
    return f"{name} differs by {off:.3g} at the first call, its largest value is {most:.3g}"


def _outcome(layer: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and gradients by name; a gradient that is not there is zero."""
    leaves, spec = pytree.tree_flatten(arguments)
    leaves = [_leaf(value) for value in leaves]
    given = pytree.tree_unflatten(leaves, spec)
    with torch.enable_grad():
        outs, _ = pytree.tree_flatten_with_path(layer(**given))
        made = {f"output{pytree.keystr(path)}": out for path, out in outs if isinstance(out, Tensor)}
        wanted = {
            f"the gradient of input {i}": t for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad
        }
        wanted |= {f"the gradient of {name}": p for name, p in layer.named_parameters() if p.requires_grad}
        pulled = sum((out * _pull(out)).sum() for out in made.values())
        if not wanted or not isinstance(pulled, Tensor) or not pulled.requires_grad:
            return {name: out.detach() for name, out in made.items()}
        found = torch.autograd.grad(pulled, list(wanted.values()), allow_unused=True)
    grads = {name: torch.zeros_like(wanted[name]) if g is None else g for name, g in zip(wanted, found, strict=True)}
    return {name: out.detach() for name, out in (made | grads).items()}


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_()


def _pull(out: Tensor) -> Tensor:
    """Numbers of both signs, drawn from no generator."""
    return torch.arange(out.numel(), device=out.device).double().cos().to(out.dtype).reshape(out.shape)
