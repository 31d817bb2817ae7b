"""Thirty reads of Python state, changed at the third step: eager against today's capture and against the Dynamo front end."""

import sys, tempfile, torch, torch._dynamo as dynamo, wholestep
from torch import nn

import torch.nn.functional as F, os, contextvars, threading, functools, collections, numpy as np, random, datetime, itertools, warnings, weakref, types as T
warnings.simplefilter("ignore"); torch.set_num_threads(1)
B = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.randn(8, 3, generator=torch.Generator().manual_seed(i + 9))) for i in range(4)]
class Net(nn.Module):
    def __init__(s): super().__init__(); s.a, s.b = nn.Linear(6, 16), nn.Linear(16, 3)
    def forward(s, x): return s.b(torch.tanh(s.a(x)))
mse = lambda m, b: F.mse_loss(m(b[0]), b[1])
C = {}
def case(f): C[f.__name__] = f; return f
@case
def env():
    os.environ["LAB_W"] = "1.0"
    return Net(), lambda m, b: mse(m, b) * float(os.environ["LAB_W"]), lambda i: os.environ.__setitem__("LAB_W", "1.0" if i < 2 else "0.1")
@case
def env_get():
    os.environ["LAB_W"] = "1.0"
    return Net(), lambda m, b: mse(m, b) * float(os.getenv("LAB_W", "1")), lambda i: os.environ.__setitem__("LAB_W", "1.0" if i < 2 else "0.1")
@case
def contextvar():
    v = contextvars.ContextVar("v", default=1.0); v.set(1.0); return Net(), lambda m, b: mse(m, b) * v.get(), lambda i: v.set(1.0 if i < 2 else 0.1)
@case
def thread_local():
    t = threading.local(); t.w = 1.0
    def ch(i): t.w = 1.0 if i < 2 else 0.1
    return Net(), lambda m, b: mse(m, b) * t.w, ch
@case
def lru_cached():
    st = {"w": 1.0}
    @functools.lru_cache
    def w(): return st["w"]
    def ch(i): st["w"] = 1.0 if i < 2 else 0.1
    return Net(), lambda m, b: mse(m, b) * w(), ch
@case
def np_random():
    np.random.seed(0); return Net(), lambda m, b: mse(m, b) * (1 + np.random.rand()), lambda i: np.random.seed(i)
@case
def np_generator():
    g = np.random.default_rng(0); return Net(), lambda m, b: mse(m, b) * (1 + g.random()), lambda i: None
@case
def py_random_instance():
    g = random.Random(0); return Net(), lambda m, b: mse(m, b) * (1 + g.random()), lambda i: None
@case
def generator_next():
    g = iter([1.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1, .1, .1, .1, .1]); return Net(), lambda m, b: mse(m, b) * next(g), lambda i: None
@case
def python_generator():
    def gen():
        k = 0
        while True: k += 1; yield 1.0 if k < 3 else 0.1
    g = gen(); return Net(), lambda m, b: mse(m, b) * next(g), lambda i: None
HELP = lambda x: x
@case
def global_function_swapped():
    globals()["HELP"] = lambda x: x
    def ch(i):
        if i == 2: globals()["HELP"] = lambda x: 0.1 * x
    return Net(), lambda m, b: HELP(mse(m, b)), ch
@case
def code_rebound():
    def h(x): return x
    def h2(x): return 0.1 * x
    def ch(i):
        if i == 2: h.__code__ = h2.__code__
    return Net(), lambda m, b: h(mse(m, b)), ch
@case
def class_method_patched():
    class K:
        def w(self): return 1.0
    k = K()
    def ch(i):
        if i == 2: K.w = lambda self: 0.1
    return Net(), lambda m, b: mse(m, b) * k.w(), ch
@case
def inherited_class_attr():
    class A: w = 1.0
    class K(A): pass
    k = K()
    def ch(i):
        if i == 2: A.w = 0.1
    return Net(), lambda m, b: mse(m, b) * k.w, ch
@case
def shadowed_class_attr():
    class A: w = 1.0
    class K(A): pass
    k = K()
    def ch(i):
        if i == 2: K.w = 0.1
    return Net(), lambda m, b: mse(m, b) * k.w, ch
@case
def default_args_rebound():
    def h(x, k=1.0): return x * k
    def ch(i):
        if i == 2: h.__defaults__ = (0.1,)
    return Net(), lambda m, b: h(mse(m, b)), ch
@case
def functional_patched():
    orig = F.mse_loss
    def ch(i):
        F.mse_loss = orig if i < 2 or i >= 5 else (lambda a, b: 0.1 * orig(a, b))
    return Net(), lambda m, b: F.mse_loss(m(b[0]), b[1]), ch
@case
def module_forward_class_patched():
    class M(Net): pass
    M.forward = Net.forward
    def ch(i):
        if i == 2: M.forward = lambda s, x: 0.1 * Net.forward(s, x)
    return M(), mse, ch
@case
def linear_forward_patched():
    orig = nn.Linear.forward
    def ch(i): nn.Linear.forward = orig if i < 2 or i >= 5 else (lambda s, x: 0.5 * orig(s, x))
    return Net(), mse, ch
@case
def global_forward_hook():
    h = []
    def ch(i):
        if i == 2: h.append(nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 0.5))
        if i == 5: h[0].remove()
    return Net(), mse, ch
@case
def weak_ref():
    class O: pass
    o = O(); o.w = 1.0; r = weakref.ref(o)
    def ch(i): o.w = 1.0 if i < 2 else 0.1
    return Net(), lambda m, b: mse(m, b) * r().w, ch
@case
def mapping_proxy():
    d = {"w": 1.0}; p = T.MappingProxyType(d)
    def ch(i): d["w"] = 1.0 if i < 2 else 0.1
    return Net(), lambda m, b: mse(m, b) * p["w"], ch
@case
def file_read():
    path = os.path.join(tempfile.mkdtemp(), "w.txt")
    open(path, "w").write("1.0")
    def ch(i): open(path, "w").write("1.0" if i < 2 else "0.1")
    return Net(), lambda m, b: mse(m, b) * float(open(path).read()), ch
@case
def now():
    class Clock:
        t = 0
        def now(s): return Clock.t
    c = Clock()
    def ch(i): Clock.t = i
    return Net(), lambda m, b: mse(m, b) * (1.0 if c.now() < 2 else 0.1), ch
@case
def counter_obj():
    c = collections.Counter()
    def loss(m, b): c["n"] += 1; return mse(m, b) * (1.0 if c["n"] < 3 else 0.1)
    return Net(), loss, lambda i: None
@case
def defaultdict_():
    c = collections.defaultdict(float); c["w"] = 1.0
    def ch(i): c["w"] = 1.0 if i < 2 else 0.1
    return Net(), lambda m, b: mse(m, b) * c["w"], ch
@case
def nested_module_list_of_floats():
    m = Net(); m.cfg = [dict(w=(1.0, [1.0]))]
    def ch(i): m.cfg[0]["w"][1][0] = 1.0 if i < 2 else 0.1
    return m, lambda mm, b: mse(mm, b) * m.cfg[0]["w"][1][0], ch
@case
def default_dtype_flag():
    def ch(i): torch.set_default_dtype(torch.float64 if i in (2, 3) else torch.float32)
    return Net(), lambda m, b: mse(m, b) * torch.ones(()).double().mean().float() * (0.1 if torch.get_default_dtype() == torch.float64 else 1.0), ch
@case
def grad_mode_param_freeze():
    m = Net()
    def ch(i): m.a.weight.requires_grad_(i < 2)
    return m, mse, ch
@case
def data_pointer_swap():
    m = Net(); keep = m.a.weight.data.clone()
    def ch(i):
        if i == 2: m.a.weight.data = keep.clone() * 0.5
    return m, mse, ch

def eag(m,loss,o,b):
    o.zero_grad(); l=loss(m,b); l.backward(); o.step(); return l.detach()
def train(name, kind):
    torch.manual_seed(0); dynamo.reset(); falls = ()
    try:
        m, loss, change = C[name](); o = torch.optim.SGD(m.parameters(), 0.1)
        step = None if kind=="eager" else wholestep.compile(m, loss, o, B[0], backend='interpret', check='off', cache=False)
        run = (lambda b: eag(m,loss,o,b)) if kind == "eager" else step
        losses = []
        for i in range(5): change(i); losses.append(round(float(run(B[i % 4])), 5))
        change(5); falls = step.falls if step else ()
    except Exception as error: losses = f"{type(error).__name__}: {error}"
    finally: torch.set_default_dtype(torch.float32)
    return losses, falls
total = collections.Counter()
for name in sys.argv[1:] or C:
    want, line = train(name, "eager")[0], ""
    for kind in ("dynamo",):
        got, falls = train(name, kind)
        verdict = "error" if isinstance(got, str) else "WRONG" if got != want else "loud" if falls else "right"
        total[kind, verdict] += 1; line += f"  {kind}: {verdict:5s}"
    print(f"{name:32s}{line}", falls, flush=True)
print(dict(total))
