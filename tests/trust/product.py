"""Trainings made by rule: where a value is held x how it is used x where it is read x how it changes, each against eager.

Every combination is a small program in text, as people write it, so that closures, globals and classes are real ones.
`python -m tests.trust.product --count 500 --seed 3` trains a sample; `--only` takes parts of names.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import sys
import textwrap
import time
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tests.trust import product_holders, product_places
from tests.trust.case import STEPS, Case, Made, pairs
from tests.trust.run import Outcome, judge


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Where a value is held: lines that make it of `first`, the expression that reads it, and lines that write `new` to it."""

    setup: str
    read: str
    write: str
    declare: str
    """`nonlocal` or `global`, for functions that write."""


def _parts(text: str) -> dict[str, list[str]]:
    """Lines by name."""
    found: dict[str, list[str]] = {}
    for line in text.strip().splitlines():
        if line.startswith("== "):
            lines = found[line.removeprefix("== ")] = []
        else:
            lines.append(line)
    return found


def _holder(lines: list[str]) -> Holder:
    marked = lambda mark: [line.removeprefix(mark) for line in lines if line.startswith(mark)]  # noqa: E731
    setup = [line for line in lines if not line.startswith(("-> ", "<- ", "!! "))]
    (read,) = marked("-> ")
    write = marked("<- ") or [f"{read} = new"]
    return Holder("\n".join(setup), read, "\n".join(write), *(marked("!! ") or ["pass"]))


HOLDERS = {name: _holder(lines) for name, lines in _parts(product_holders.HOLDERS).items()}
PLACES = {name: "\n".join(lines) for name, lines in _parts(product_places.PLACES).items()}
USES: dict[str, str] = {
    # v is a number, a truth, a text or None; z a tensor that needs a gradient, of any shape with two dimensions
    "times": "z * v",
    "plus": "z + v",
    "power": "z.abs().add(1) ** v",
    "number to a power": "z * (2.0 ** v)",
    "negative": "z * -v",
    "divided": "z / (v + 3)",
    "floor division": "z * (7 // (v + 1))",
    "remainder": "z * ((v * 10) % 3 + 1)",
    "branch": "z * 2 if v > 0.4 else z * 0.5",
    "truth": "z * 2 if v else z * 0.5",
    "truth negated": "z.tanh() if not v else z",
    "equal": "z * 2 if v == 0.5 else z * 0.5",
    "among": "z * 2 if v in (0.5, 1, 'a') else z * 0.5",
    "key": "z * {0.5: 2.0, 1: 3.0, 'a': 0.25, None: 4.0}.get(v, 1.0)",
    "kind": "z * 2 if isinstance(v, int) else z * 0.5",
    "exact kind": "z * 2 if type(v) is bool else z * 0.5",
    "identity": "z * 2 if v is True or v is None else z * 0.5",
    "name of the kind": "z * len(type(v).__name__)",
    "text": "z * len(f'{v}')",
    "text by str": "z * (2 if str(v) == '0.5' else 0.5)",
    "text by repr": "z * (2 if repr(v).startswith('1') else 0.5)",
    "text with places": "z * float(f'{float(v):.1f}')",
    "text by percent": "z * float('%.1f' % v)",
    "text by format": "z * float('{:.2f}'.format(v))",
    "rounded": "z * round(v, 1)",
    "rounded whole": "z * (round(v * 3) + 1)",
    "whole": "z * int(v * 4)",
    "floor": "z * (math.floor(v * 3) + math.ceil(v))",
    "sine": "z * math.sin(v)",
    "square root": "z * math.sqrt(abs(v))",
    "exponential": "z * math.exp(-v)",
    "logarithm": "z * math.log(v + 2)",
    "largest": "z * max(v, 0.3)",
    "clamped number": "z * min(max(v, 0.2), 0.8)",
    "sorted": "z * sorted([v, 0.4, 0.7])[0]",
    "sum": "z * sum([v, v, 1])",
    "sum of a generator": "z * sum(v * k for k in range(3))",
    "absolute": "z * abs(v - 0.4)",
    "chained": "z * 2 if 0.2 < v <= 0.6 else z * 0.5",
    "and": "z * (v and 2.0)",
    "or": "z * (v or 2.0)",
    "loop": "functools.reduce(lambda a, k: a * 1.1, range(int(v * 4)), z)",
    "while": "step_while(z, v)",
    "slice": "z[:, : int(v * 2) + 1].sum() * z",
    "index": "z * [1.0, 2.0, 3.0][int(v)]",
    "repeat": "torch.cat([z] * (int(v * 2) + 1)).mean() * z",
    "tensor": "z * torch.tensor(v)",
    "tensor of a list": "z * torch.tensor([v, 1.0]).sum()",
    "as tensor": "z * torch.as_tensor(v)",
    "full": "z * torch.full((1, 1), v)",
    "full like": "z * torch.full_like(z, v)",
    "new tensor": "z * z.new_tensor(v)",
    "where": "torch.where(z > 0, z, v * z)",
    "where by number": "torch.where(z > v, z, z * 0.5)",
    "compared tensor": "z * (z > v)",
    "compared whole tensor": "z * (torch.arange(z.shape[1]) >= v)",
    "leaky": "F.leaky_relu(z, v)",
    "softplus": "F.softplus(z, beta=v + 1)",
    "clamp": "z.clamp(-v, v)",
    "lerp": "torch.lerp(z, z.tanh(), v)",
    "alpha": "torch.add(z, z, alpha=v)",
    "value": "torch.addcmul(z, z, z, value=v)",
    "norm": "z * z.norm(v + 1)",
    "smooth": "F.smooth_l1_loss(z, z.tanh(), beta=v + 0.1) * z",
    "layer norm": "F.layer_norm(z, z.shape[1:], eps=v + 0.1)",
    "dropout flag": "F.dropout(z, 0.0, training=bool(v))",
    "roll": "z * z.roll(int(v), 1)",
    "axis": "z * z.sum(dim=int(bool(v)), keepdim=True)",
    "top": "z * z.topk(int(v) + 1).values.sum()",
    "in place": "z.clone().mul_(v)",
    "type": "z.to(torch.float64 if v else torch.float32).float() * (2 if v else 1)",
    "detached": "z.detach() * 0.5 + z if v else z",
    "gradients off": "with_gradients(z, v)",
    "walrus": "z * w if (w := v) else z",
    "match": "by_match(z, v)",
    "caught": "by_catching(z, v)",
    "generator": "z * next(k for k in (v, 1.0) if k is not None)",
    "map": "z * sum(map(lambda k: k * v, (1.0, 2.0)))",
    "filter": "z * len(list(filter(lambda k: k > v, (0.1, 0.4, 0.9))))",
    "any": "z * (2 if any(v > k for k in (0.3, 0.9)) else 1)",
    "zip": "z * sum(a * b for a, b in zip((v, 1.0), (0.5, v)))",
    "bits": "z * (1 << int(v))",
    "divmod": "z * sum(divmod(v * 5, 2))",
    "is whole": "z * (2 if float(v).is_integer() else 0.5)",
    "close": "z * (2 if math.isclose(v, 0.5) else 0.5)",
    "hash": "z * (hash(v) % 3 + 1)",
    "operator": "operator.mul(z, operator.add(v, 1))",
    "product": "z * math.prod([v, 2])",
    "complex": "z * abs(complex(v, 1))",
    "of numpy": "z * float(np.sqrt(abs(v)))",
    "numpy number": "z * np.float64(v)",
    "mean": "z * statistics.mean([v, 1.0])",
    "assertion": "checked(z, v)",
    "cast": "z * float(v)",
    "boolean": "z * bool(v)",
    "not none": "z * (1.0 if v is None else v)",
    "none asked": "z * 2 if v is None else z * 0.5",
    "text joined": "z * len('-'.join([str(v), 'x']))",
    "keyword": "by_keyword(z, gain=v)",
    "recursion": "by_recursion(z, v, 3)",
    "einsum": "torch.einsum('ij,ij->ij' if v else 'ij,ij->i', z, z).reshape(z.shape[0], -1) + z",
    "pad": "F.pad(z, (0, int(v))).sum() * z",
    "arange": "z * torch.arange(int(v * 3) + 1).sum()",
    "linspace": "z * torch.linspace(0, v, 3).sum()",
    "threshold": "F.threshold(z, v, 0.0)",
    "cosine schedule": "z * (0.5 * (1 + math.cos(math.pi * min(1.0, v))))",
    "scalar product": "v * z if v != 0 else z",
    "interval": "z * (bisect.bisect([0.2, 0.4, 1.0], v) + 1)",
    "copy": "z * copy.deepcopy(v)",
    "several": "(z * v + v) / (1 + v * v) if v < 0.9 else z - v",
    "difference": "z * (2 if v - 0.5 > 0 else v)",
    "conversion": "z * int(str(int(v)))",
    "set": "z * len({v, 0.5, 1})",
    "fraction": "z * float(fractions.Fraction(v).limit_denominator(4))",
    "decoded": "z * float(json.loads(json.dumps(v)))",
}  # fmt: skip

_AS_SIZES = {"loop", "while", "slice", "repeat", "bits", "pad", "arange"}
_WITHOUT_BATCH = {"parameter hook", "forward hook", "forward pre-hook", "parametrization", "sequential"}

CHANGES: dict[str, list[Any]] = {
    "once": [1.0, 1.0, 1.0, 0.25, 0.25, 0.25],
    "ramp": [0.1, 0.25, 0.375, 0.5, 0.75, 1.25],
    "alternating": [1.0, 0.5, 1.0, 0.5, 1.0, 0.5],
    "there and back": [0.5, 0.5, 0.25, 0.25, 0.5, 0.5],
    "to nothing": [0.5, 0.25, 0.0, 0.0, 1.0, 0.0],
    "to one": [0.5, 1.0, 1.0, 0.5, 1.0, 2.0],
    "whole numbers": [1, 2, 3, 0, 2, 1],
    "whole and not": [1, 1.0, 2, 2.0, 1.0, 1],
    "truths": [True, False, True, False, False, True],
    "truths and numbers": [1, True, 1.0, 0, False, 0.0],
    "none": [0.5, None, 0.5, 0.25, None, 1.0],
    "none first": [None, None, 0.5, 0.25, 0.25, None],
    "texts": ["a", "b", "a", "a", "c", "b"],
    "numbers of numpy": [0.5, "np.float64(0.5)", "np.float64(0.25)", 0.25, "np.float32(0.25)", "np.int64(1)"],
    "below nothing": [0.5, -0.5, -0.25, 0.5, -1.0, 0.25],
    "last": [0.5, 0.5, 0.5, 0.5, 0.5, 1.5],
    "second": [0.5, 1.5, 1.5, 1.5, 1.5, 1.5],
    "large": [1, 2**31, 2**33, 1, 2**40, 3],
    "kinds": [0.5, "a", None, 1, True, 0.5],
    "tensors": ["torch.tensor(0.5)", "torch.tensor(0.25)", "torch.tensor(0.25)", 0.5, "torch.tensor(1)", "torch.tensor(2.0)"],
    "by the loss, halved": [0.75, "v * 0.5"],
    "by the loss, counted": [0, "v + 1"],
    "by the loss, negated": [True, "not v"],
    "by the loss, capped": [0.25, "min(v * 2, 1.0)"],
}  # fmt: skip
"""The values of the six steps; or the first, and what the function that reads it makes of it (`by the loss`)."""

TEMPLATE = """
{helpers}
def build(values, optimizer_of):
    first = values[0]
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 3)
        def forward(self, x, batch):
            return self.b(look(torch.tanh(self.a(x)), batch))
    model = target = Model()
    optimizer = optimizer_of(model)
    def term(z, at, batch):
        {declare}
        v = {read}
        out = {use}
{inner}
        return out
{place}
{setup}
    def loss_fn(model, batch):
        return F.mse_loss(model(batch[0], batch), batch[1])
    def change(i, batch):
        {declare}
        new = values[i]
{write}
    def state():
        return {state}
    optimizer = optimizer_of(model, optimizer)
    return model, loss_fn, optimizer, change, state
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Combination:
    """One of each."""

    holder: str
    use: str
    place: str
    change: str

    @property
    def name(self) -> str:
        return " / ".join((self.holder, self.use, self.place, self.change))

    @property
    def by_the_loss(self) -> bool:
        return self.change.startswith("by the loss")

    @property
    def possible(self) -> bool:
        of_batch = HOLDERS[self.holder].read.startswith("batch")
        too_large = self.change == "large" and self.use in _AS_SIZES
        by_address = self.change == "tensors" and self.use in (
            "hash",
            "set",
            "key",
        )  # of a tensor, another one in every run
        return (
            not too_large and not by_address and not (of_batch and (self.place in _WITHOUT_BATCH or self.by_the_loss))
        )

    def source(self) -> str:
        """The program."""
        holder = HOLDERS[self.holder]
        indent = lambda text, depth: textwrap.indent(text or "pass", "    " * depth)  # noqa: E731
        inner = f"new = {CHANGES[self.change][1]}\n{holder.write}" if self.by_the_loss else "pass"
        outer = "pass" if self.by_the_loss else holder.write
        return TEMPLATE.format(
            helpers=product_places.HELPERS, setup=indent(holder.setup, 1), declare=holder.declare, read=holder.read,
            use=USES[self.use], inner=indent(inner, 2), place=indent(PLACES[self.place], 1), write=indent(outer, 2),
            state=holder.read if self.by_the_loss and "at." not in holder.read else "None",
        )  # fmt: skip

    def build(self, module_name: str = "made_by_product") -> Made:
        module = types.ModuleType(module_name)
        module.__file__ = __file__
        sys.modules[module.__name__] = module
        exec(compile(self.source(), __file__, "exec"), module.__dict__)
        values = CHANGES[self.change]
        values = [values[0]] * STEPS if self.by_the_loss else values
        values = [
            eval(v, module.__dict__) if isinstance(v, str) and "(" in v and not self.by_the_loss else v for v in values
        ]
        batches: list[Any] = [[*pair, values[0], {"gain": values[0]}] for pair in pairs(5)]
        model, loss_fn, optimizer, change, state = module.build(values, _optimizer)
        return Made(model, loss_fn, optimizer, batches, lambda i: change(i, batches[i]), state=state, raises=None)

    def case(self) -> Case:
        return Case(self.name, "product", lambda: self.build(), False)


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two at once: their losses are added up."""

    parts: tuple[Combination, Combination]

    def build(self) -> Made:
        a, b = (part.build(f"made_by_product_{i}") for i, part in enumerate(self.parts))
        batches: list[Any] = [[*both] for both in zip(a.batches, b.batches)]
        optimizer = torch.optim.SGD([*a.model.parameters(), *b.model.parameters()], lr=0.1)
        return Made(
            {"a": a.model, "b": b.model}, lambda m, batch: a.loss_fn(m["a"], batch[0]) + b.loss_fn(m["b"], batch[1]), optimizer,
            batches, lambda i: (a.change(i), b.change(i)), state=lambda: [a.state(), b.state()], raises=None,
        )  # fmt: skip

    def case(self) -> Case:
        return Case(" + ".join(part.name for part in self.parts), "product", self.build, False)


def pairs_of(count: int, seed: int) -> Iterator[Pair]:
    """Of those that hold nothing in an optimizer, of which a pair has another one."""
    usable = [one for one in combinations(3 * count, seed) if "optimizer" not in one.holder]
    yield from map(Pair, zip(usable[:count], usable[count : 2 * count]))


def _optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """Made before what the program adds to the model, whose parameters join a group of their own later."""
    if optimizer is None:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = [p for p in model.parameters() if id(p) not in known]
    if added:
        optimizer.param_groups[0]["params"] += added
    return optimizer


def combinations(count: int, seed: int, only: Sequence[str] = ()) -> Iterator[Combination]:
    """`count` of them at random, none twice."""
    source = random.Random(seed)
    tables = [[*filter(table.__contains__, only)] or [*table] for table in (HOLDERS, USES, PLACES, CHANGES)]
    seen = set()
    for _ in range(count * 3):
        one = Combination(*map(source.choice, tables))
        if one.possible and one not in seen:
            seen.add(one)
            yield one
            if len(seen) == count:
                return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.trust.product", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="a holder, use, place or change by its name")
    parser.add_argument("--name", action="append", default=[], help="one combination by its whole name")
    parser.add_argument("--pairs", action="store_true", help="two programs at once")
    parser.add_argument("--backend", choices=("interpret", "inductor"), default="interpret")
    parser.add_argument("--check", choices=("off", "first"), default="off")
    parser.add_argument("--source", action="store_true", help="print the programs only")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--all", action="store_true", help="a line for those that are whole, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [Combination(*name.split(" / ")) for name in asked.name] or combinations(
        asked.count, asked.seed, asked.only
    )
    if asked.pairs:
        chosen = pairs_of(asked.count, asked.seed)
    counts: collections.Counter[str] = collections.Counter()
    began = time.perf_counter()
    for one in chosen:
        if time.perf_counter() - began > asked.seconds:
            break
        if asked.source:
            print(one.source().replace(product_places.HELPERS, ""))
            continue
        found: Outcome = judge(one.case(), backend=asked.backend, check=asked.check)
        counts[found.verdict] += 1
        if found.verdict != "whole" or asked.all or asked.name:
            print(f"{found.verdict:<8}{found.case.name:<70}{found.seconds:6.2f} s  {found.detail[:300]}", flush=True)
    print(dict(counts), f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
