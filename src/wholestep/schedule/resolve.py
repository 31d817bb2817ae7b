"""The resolver: a Recipe and a model in, what becomes of it out: edits of modules, rewrites of the forward, decisions of a Plan.

What needs no graph is decided when the recipe meets the model (`resolve`). What a Plan says about values is decided when the step
is captured and prepared (`Scheduled.settle`): the planner proposes a plan for its budget, or for speed, and each line that says
otherwise is written over it, so an explicit verb beats the budget and the budget beats the default. The planner weighs its plans
with the lines written over them, so that what it counts is what runs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from wholestep.capture.edits import Edits
from wholestep.errors import BadOption
from wholestep.graph.keys import joined_key, layer_ranks, split_key, value_keys
from wholestep.graph.layers import layers_of, without_calls
from wholestep.graph.mesh import Mesh, Ranks
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, matched_by, module_of, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.ops.record import may_recompute
from wholestep.ops.tuned import Asking, calls_that_ask
from wholestep.ops.tuner import TUNER
from wholestep.schedule.cuts import cuts_of, localised, shard_table, syncs_of
from wholestep.schedule.modules import Modules, inside, nearest
from wholestep.schedule.moves import moved_by_lines
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.verb import AUTO, NoEngineYet, Verb, shown
from wholestep.schedule.verbs.cudagraph import cudagraph
from wholestep.schedule.verbs.offload import offload
from wholestep.schedule.verbs.precision import precision
from wholestep.schedule.verbs.replace import replace
from wholestep.schedule.verbs.replace_all import replace_all


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A recipe that fits a model."""

    recipe: Recipe
    modules: Modules
    edits: Edits
    whole_precision: str | None
    """Of the whole step; None where no line says so."""
    precision: Mapping[str, str]
    """Place -> precision, inner modules after those that hold them."""
    cuda_graph: bool | None
    ranks: Ranks
    """Who runs the step, and which parameters are cut."""
    by_function: bool
    """Whether operators are computed by a function that no graph shows: such a step is not kept on disk."""

    def beside(self, plan: Plan, graph: TrainingGraph) -> Plan:
        """A plan that is given beside the recipe must say what the recipe says, for it is what became of it. Kernels may be
        missing: one that was made on another machine could not ask for them."""
        settled = self.settle(plan, graph)
        other = {
            name
            for name in ("recompute", "host", "file", "fuse")
            if set(getattr(settled, name)) != set(getattr(plan, name))
        }
        for name in ("precision", "kernel"):
            now, before = getattr(settled, name), getattr(plan, name)
            if any(now[place] != value for place, value in before.items()):
                other.add(name)
        for name in ("mesh", "shard"):
            if getattr(plan, name) and getattr(settled, name) != getattr(plan, name):
                now, before = (dict(getattr(one, name)) for one in (settled, plan))
                raise BadOption(f"the plan was made for {name} {before}, now it is {now}", hint="make the plan again")
        for name in sorted(other):
            line = self.recipe.of("offload" if name in ("host", "file") else name)[0]
            hint = "make the plan again with the recipe, or give one of them"
            raise BadOption(f"the plan says something else about {name} than {self.recipe.place(line)}", hint=hint)
        return settled

    def settle(self, plan: Plan, graph: TrainingGraph) -> Plan:
        """A plan with what the recipe says written over it."""
        reasons = dict(plan.reasons)
        again = self._recompute(plan.recompute, graph, reasons)
        fused = [place for line in self.recipe.of("fuse") for place in self._fused(line)]
        kernels = self._kernels(graph)
        plan = _with_recomputed(plan, again, reasons)
        moving = self.recipe.of("offload")
        if moving:
            plan = dataclasses.replace(plan, **moved_by_lines(moving, plan, graph, self.modules, self.recipe.place))
        return dataclasses.replace(
            plan, precision={**plan.precision, **self.precision}, kernel={**plan.kernel, **kernels},
            fuse=tuple(dict.fromkeys((*plan.fuse, *fused))), replace={**plan.replace, **self._replaced()},
            mesh=graph.ranks.mesh.to_table(), shard=shard_table(graph.ranks.cuts),
        )  # fmt: skip

    # ---- recompute ----

    def _recompute(self, before: tuple[str, ...], graph: TrainingGraph, reasons: dict[str, str]) -> tuple[str, ...]:
        lines: list[Any] = [line for line in self.recipe.of("recompute") if line.ratio != AUTO]  # type: ignore[attr-defined]
        if not lines:
            return before
        keys, layers = value_keys(graph), layers_of(graph.graph.nodes)
        ranks = layer_ranks(keys, layers)
        chosen: dict[str, set[int]] = {}
        for key in before:
            base, wanted = split_key(key)
            if base in ranks:
                chosen[base] = set(range(len(ranks[base])) if wanted is None else wanted)
        decided = _Decided(lines, self.modules)
        told: dict[str, Verb] = {}
        for node, key in keys.items():
            line, again = decided.about(node)
            if line is None or is_cheap_view(node):  # a view of what is recomputed is recomputed
                continue
            rank, known = ranks[key][layers.get(node)], chosen.setdefault(key, set())
            if again and may_recompute(_maker(node)):
                known.add(rank)
                told[key] = line
            else:
                known.discard(rank)
        asked = [key for line in lines if "/" in line.at for key in (line.at,)]
        found = [joined_key(key, wanted, len(ranks[key])) for key, wanted in chosen.items() if wanted]
        reasons |= {key: self.recipe.place(told[split_key(key)[0]]) for key in found if split_key(key)[0] in told}
        taken = {split_key(key)[0] for key in asked}
        return (*(key for key in found if split_key(key)[0] not in taken), *asked)

    # ---- places ----

    def _fused(self, line: Any) -> list[str]:
        return [f"matched: {line}"] if line.pattern is not None else plan_places(line.at, self.modules)

    def _replaced(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in self.recipe:
            if isinstance(line, replace | replace_all):
                of = line.pattern if isinstance(line, replace) else line.what
                place = line.at or "the model"
                found[place if of is None else f"{place}: {_name(of)}"] = _name(line.by or line.make)
        return found

    # ---- kernels ----

    def _kernels(self, graph: TrainingGraph) -> dict[str, str]:
        lines: list[Any] = [line for line in self.recipe.of("kernel") if line.take != AUTO]  # type: ignore[attr-defined]
        if (
            graph.target.is_gpu and not torch.cuda.is_available()
        ):  # planned here, to run elsewhere: nothing can be asked
            return {}
        calls = list(calls_that_ask(graph)) if lines else []
        taken: dict[str, Any] = {}
        for line in lines:
            if line.take is not None:
                places = [place for place in plan_places(line.at, self.modules) if any(c.fits(place) for c in calls)]
                if not places:
                    raise BadOption(f"{self.recipe.place(line)}: the step has no choice there", hint=_choices(calls))
                taken |= dict.fromkeys(places, line)
        found = {place: line.take for place, line in taken.items()}
        forbidding = [line for line in lines if line.forbid is not None]
        met: dict[int, set[str]] = {id(line): set() for line in forbidding}
        """Line -> the implementations that the calls have which it is about."""
        chosen: dict[str, dict[str, str]] = defaultdict(dict)
        """Key -> module -> what is taken instead of what is forbidden; nothing where a call is free."""
        for call in calls:
            takes = [line for place, line in taken.items() if call.fits(place)][-1:]
            for line in takes:
                call.refuse_unusable(line.take, self.recipe.place(line))
            about = [line for line in forbidding if self._is_about(line, call)]
            for line in about:
                met[id(line)] |= {candidate.name for candidate in call.question.candidates}
            about = [line for line in about if all(self._width(line) < self._width(take) for take in takes)]
            never = {line.forbid for line in about}
            chosen[call.key][without_calls(call.module)] = ""
            if not about or any(take.take not in never for take in takes):
                continue
            left = [candidate for candidate in call.question.candidates if candidate.name not in never]
            usable = [candidate.name for candidate in left if candidate.supports() is None]
            if not usable:
                raise BadOption(f"{self.recipe.place(about[-1])}: no other implementation supports {call.key}")
            reference = call.question.reference if call.question.reference in usable else usable[0]
            asked = (call.question.call, "without", *sorted(never))
            question = dataclasses.replace(call.question, candidates=left, call=asked, reference=reference)
            chosen[call.key][without_calls(call.module)] = TUNER.choose(question).name
        for key, names in chosen.items():  # equal layers share a key: it is written where all of them are decided alike
            alike = len(set(names.values())) == 1
            found |= {key if alike else module: name for module, name in names.items() if name}
        for line in forbidding:
            known = sorted(met[id(line)])
            if not known:
                raise BadOption(f"{self.recipe.place(line)}: the step has no choice there", hint=_choices(calls))
            if line.forbid not in known:  # one that the machine lacks is known all the same
                hint = nearest(line.forbid, known, f"they are {', '.join(known)}")
                raise BadOption(f"{self.recipe.place(line)}: no implementation has that name", hint=hint)
        return found

    def _width(self, line: Any) -> int:
        """How many modules a line is about: of two lines about one call the narrower counts."""
        if "/" in line.at:
            return 0
        paths = self.modules.select(line.at)
        return sum(any(inside(inner, path) for path in paths) for inner, _ in self.modules)

    def _is_about(self, line: Any, call: Any) -> bool:
        if "/" in line.at:
            return bool(call.key == line.at)
        paths = self.modules.first_names(self.modules.select(line.at)).values()
        return any(inside(without_calls(call.module), path) for path in paths)


def _choices(calls: Sequence[Asking]) -> str:
    """Where a step has calls with several implementations."""
    known = ", ".join(sorted({call.key for call in calls})[:3])
    return f"there is one in {known}" if known else "attentions and chunked losses have several implementations"


class _Decided:
    """Which line decides about a value of the forward pass: that of the innermost module, of two the last."""

    def __init__(self, lines: list[Any], modules: Modules) -> None:
        self.paths: dict[str, tuple[Any, bool]] = {}
        for line in sorted(lines, key=lambda line: -len(modules.select(line.at)) if "/" not in line.at else 0):
            if "/" not in line.at and line.pattern is None:  # narrower lines later: they count
                chosen = line.chosen(modules)
                first = modules.first_names(chosen)
                self.paths |= {first[path]: (line, again) for path, again in reversed(chosen.items())}
        self.patterns = {str(line): line for line in lines if line.pattern is not None}

    def about(self, node: fx.Node) -> tuple[Any, bool]:
        """(the line, or None; whether the value is recomputed)."""
        mark = next((mark for mark in reversed(matched_by(node)) if mark in self.patterns), None)
        if mark is not None:
            return self.patterns[mark], not _leaves(node, lambda user: mark in matched_by(user))
        called = (module_of(node) or "").split(".")
        for count in range(len(called), -1, -1):
            path = without_calls(".".join(called[:count]))
            if path in self.paths:
                line, again = self.paths[path]
                module = ".".join(called[:count])
                return line, again and not _leaves(
                    node, lambda user, module=module: inside(module_of(user) or "", module)
                )
        return None, False


def _leaves(node: fx.Node, within: Any) -> bool:
    """Whether the forward pass reads a value, or a view of it, outside: it is what a module returns, and is kept."""
    for user in node.users:
        if user.op == "output":
            return True
        if phase_of(user) != "forward":
            continue
        if not within(user) or ((is_cheap_view(user) or user.target is operator.getitem) and _leaves(user, within)):
            return True
    return False


def _with_recomputed(plan: Plan, again: tuple[str, ...], reasons: dict[str, str]) -> Plan:
    """What a line recomputes does not wait elsewhere, whatever the planner says."""
    bases = {split_key(key)[0] for key in again}
    away: dict[str, Any] = {
        tier: tuple(k for k in getattr(plan, tier) if split_key(k)[0] not in bases) for tier in ("host", "file")
    }
    return dataclasses.replace(plan, recompute=again, reasons=reasons, **away)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)


def _maker(node: fx.Node) -> fx.Node:
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def plan_places(at: str, modules: Modules) -> list[str]:
    """A glob as a Plan writes places: itself where the Plan's own patterns mean the same modules, else every path."""
    if "/" in at:
        return [at]
    wanted = modules.select(at)
    first = modules.first_names(wanted)
    if "**" not in at and at and all(path == name for path, name in first.items()):
        meant = {path for path, _ in modules if fnmatch.fnmatchcase(path, at)}
        if meant == set(wanted):
            return [at]
    return list(dict.fromkeys(first.values()))


def resolve(recipe: Recipe, root: nn.Module, mesh: Mesh | None = None) -> Scheduled:
    """Check a recipe against a model, and decide what needs no graph. Raises NotBuiltYet for a verb without an engine."""
    modules = Modules(root)
    recipe.check(modules)
    for line in recipe:
        if isinstance(line, NoEngineYet | offload):
            line.refuse(recipe.place(line))
    changes = [change for line in recipe for change in line.changes(modules)]
    changes.sort(key=lambda change: bool(getattr(change, "wraps", False)))
    rewrites = [made for line in recipe if (made := line.rewrite()) is not None]
    whole, by_module = _precisions(recipe, modules)
    recorded = [line.record for line in recipe if isinstance(line, cudagraph) and line.record != AUTO]
    ranks = Ranks(mesh or Mesh(), cuts_of(recipe, modules, mesh))
    if ranks.several:  # after all others: it gives every value of the graph its place
        rewrites.append(functools.partial(localised, ranks, syncs_of(recipe, modules), root))
    own = [recipe.place(line) for line in recipe if isinstance(line, replace | replace_all) and line.places(modules)]
    functions = any(isinstance(line, replace | replace_all) and line.rewrite() is not None for line in recipe)
    return Scheduled(
        recipe, modules, Edits(changes, rewrites, own), whole, by_module,
        bool(recorded[-1]) if recorded else None, ranks, functions,
    )  # fmt: skip


def _precisions(recipe: Recipe, modules: Modules) -> tuple[str | None, dict[str, str]]:
    """That of the whole step, and those of places: the inner after the outer, the narrower after the wider."""
    lines = [line for line in recipe if isinstance(line, precision) and line.to != AUTO]
    whole = [line.to for line in lines if not line.at]
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    inner = sorted(
        (line for line in lines if line.at), key=lambda line: (line.at.count("."), -len(modules.select(line.at)))
    )
    for line in inner:
        for place in plan_places(line.at, modules):
            found[place].append((place, line.to))
    return (whole[-1] if whole else None), {place: pairs[-1][1] for place, pairs in found.items()}
