"""Where a value is read: parts from which `product.py` makes trainings, in text, and what every program begins with.

A part begins with `== name`: lines that define `look`, by which `term(z, at, batch)`, which reads the value, comes to be called.
"""

from __future__ import annotations

PLACES = r"""
== loss
def look(h, batch):
    return term(h, model, batch)
== forward
Model.late = lambda self, h, batch: term(h, self, batch)
def look(h, batch):
    return model.late(h, batch)
== checkpoint
def look(h, batch):
    return checkpoint(lambda z: term(z, model, batch), h, use_reentrant=False)
== vmap
def look(h, batch):
    return torch.vmap(lambda z: term(z[None], model, batch)[0])(h)
== functional gradient
def look(h, batch):
    return torch.func.grad(lambda z: (term(z, model, batch) ** 2).sum())(h) * 0.01 + h
== forward derivative
def look(h, batch):
    return torch.func.jvp(lambda z: term(z, model, batch), (h,), (h * 0.1,))[1]
== second derivative
def look(h, batch):
    out = (term(h, model, batch) ** 2).sum()
    return torch.autograd.grad(out, h, create_graph=True)[0] * 0.01 + h
== functional call
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
    def forward(self, h, batch):
        return term(h * self.w, model, batch)
inner = Inner()
def look(h, batch):
    return torch.func.functional_call(inner, {'w': h.mean().reshape(1)}, (h, batch))
== function's forward
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, batch):
        ctx.save_for_backward(z)
        return term(z, model, batch)
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].tanh(), None
def look(h, batch):
    return Fn.apply(h, batch)
== function's backward
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, batch):
        ctx.batch = batch
        return z * 2
    @staticmethod
    def backward(ctx, g):
        return term(g, model, ctx.batch), None
def look(h, batch):
    return Fn.apply(h, batch)
== parameter hook
model.b.weight.register_hook(lambda g: term(g, model, None))
def look(h, batch):
    return h
== activation hook
def look(h, batch):
    h.register_hook(lambda g: term(g, model, batch))
    return h * 1.0
== forward hook
model.b.register_forward_hook(lambda m, i, o: term(o, m, None))
def look(h, batch):
    return h
== forward pre-hook
model.b.register_forward_pre_hook(lambda m, i: (term(i[0], m, None),))
def look(h, batch):
    return h
== generator
def every(h, batch):
    yield term(h, model, batch)
def look(h, batch):
    return next(every(h, batch))
== comprehension
def look(h, batch):
    return [term(h * k, model, batch) for k in range(2)][1]
== object
class Term:
    def __call__(self, h, batch):
        return term(h, model, batch)
the_term = Term()
def look(h, batch):
    return the_term(h, batch)
== partial
part = functools.partial(term, at=model)
def look(h, batch):
    return part(h, batch=batch)
== decorator
def deco(f):
    @functools.wraps(f)
    def inner(*a, **k):
        return f(*a, **k) * 0.5
    return inner
term2 = deco(term)
def look(h, batch):
    return term2(h, model, batch)
== context manager
@contextlib.contextmanager
def given(h, batch):
    yield term(h, model, batch)
def look(h, batch):
    with given(h, batch) as out:
        return out * 2
== finally
def look(h, batch):
    try:
        raise ValueError(1)
    except ValueError:
        out = term(h, model, batch)
    finally:
        out = out * 2
    return out
== equal layers
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, h, batch):
        return h + term(self.lin(h).tanh(), self, batch)
model.layers = nn.ModuleList([Layer() for _ in range(4)])
target = model.layers[2]
def look(h, batch):
    for layer in model.layers:
        h = layer(h, batch)
    return h
== no gradients
def look(h, batch):
    with torch.no_grad():
        w = term(h, model, batch)
    return h * w
== autocast
def look(h, batch):
    with torch.autocast('cpu', enabled=False):
        return term(h, model, batch)
== map
def look(h, batch):
    return torch.stack(list(map(lambda z: term(z[None], model, batch)[0], h.unbind())))
== parametrization
class By(nn.Module):
    def forward(self, w):
        return term(w, self, None)
torch.nn.utils.parametrize.register_parametrization(model.b, 'weight', By(), unsafe=True)
target = model.b.parametrizations.weight[0]
def look(h, batch):
    return h
== nested function
def look(h, batch):
    def inner():
        def innermost():
            return term(h, model, batch)
        return innermost()
    return inner()
== default argument
def with_default(h, batch, f=term):
    return f(h, model, batch)
def look(h, batch):
    return with_default(h, batch)
== table of functions
terms = {'t': term}
def look(h, batch):
    return terms['t'](h, model, batch)
== sequential
class Layer(nn.Module):
    def forward(self, h):
        return term(h, self, None)
model.extra = nn.Sequential(nn.Tanh(), Layer())
target = model.extra[1]
def look(h, batch):
    return model.extra(h)
== twice
def look(h, batch):
    return term(term(h, model, batch), model, batch)
"""
HELPERS = r"""
import abc, argparse, ast, bisect, collections, contextlib, contextvars, copy, dataclasses, enum, fractions, functools
import inspect, json, math, operator, os, statistics, sys, threading, types, weakref
import numpy as np, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

def ast_eval(text):
    known = {'None': None, 'True': True, 'False': False}
    return known[text] if text in known else text[1:-1] if text[0] == "'" else float(text)
def step_while(z, v):
    while v > 0.3:
        z, v = z * 1.1, v / 2
    return z
def with_gradients(z, v):
    with torch.set_grad_enabled(bool(v)):
        w = z * 2
    return z * w.tanh()
def by_match(z, v):
    match v:
        case bool():
            return z * 3
        case None | 'a':
            return z * 4
        case int() | 0.5:
            return z * 2
        case _:
            return z
def by_catching(z, v):
    try:
        return z * (1 / (v - 0.5))
    except (ZeroDivisionError, TypeError):
        return z * 3
def checked(z, v):
    assert v != 77, 'no'
    if v == 78:
        raise ValueError(v)
    return z * 2
def by_keyword(z, **kw):
    return z * kw.get('gain', 1.0) * len(kw)
def by_recursion(z, v, depth):
    return z if depth == 0 else by_recursion(z * (v + 0.1), v, depth - 1)
"""
"""What every program begins with."""
