import torch, wholestep, warnings, sys
sys.path.insert(0,"/tmp/lab")
import torch.nn.functional as F
from torch import nn
class Blk(nn.Module):
    def __init__(s): super().__init__(); s.l=nn.Linear(6,6); s.k=0.5; s.calls=0
    def forward(s,x):
        s.calls+=1
        return torch.tanh(s.l(x))*s.k
class Net(nn.Module):
    def __init__(s): super().__init__(); s.b=nn.ModuleList([Blk(),Blk()]); s.o=nn.Linear(6,3); s.register_buffer("m",torch.zeros(3)); s.last=None; s.bn=nn.BatchNorm1d(6)
    def forward(s,x):
        for b in s.b: x=b(x)
        x=s.b[0](s.bn(x))
        s.last=x
        y=s.o(x); s.m.mul_(0.9).add_(y.detach().mean(0)); return y
def build():
    torch.manual_seed(0)
    net=Net(); logs=[]
    def loss_fn(model,batch):
        y=model(batch["x"]); l=F.cross_entropy(y,batch["y"]); logs.append(l.item()); return l,{"acc":(y.argmax(1)==batch["y"]).float().mean()}
    return net,loss_fn,torch.optim.AdamW(net.parameters(),1e-2),logs
bs=[{"x":torch.randn(4+i%3,6),"y":torch.randint(0,3,(4+i%3,))} for i in range(9)]
a=build(); b=build()
import time
for check in (sys.argv[1:] or ["off"]):
    a=build(); b=build()
    s=wholestep.compile(*a[:3],bs[0],backend="interpret",check=check,cache=False)
    print(a[0].b[0].calls, a[3], a[0].last)
    for i,x in enumerate(bs):
        if i==3:
            for n in (a,b): n[0].b[0].k=0.9
        if i==4:
            for n in (a,b): n[0].b[0].k=0.8
        l,aux=s(x)
        b[2].zero_grad(); l2,aux2=b[1](b[0],x); l2.backward(); b[2].step()
        print(i, float(l),float(l2), float(aux["acc"])==float(aux2["acc"]), all(torch.equal(p,q) for p,q in zip(a[0].state_dict().values(),b[0].state_dict().values())), a[0].b[0].calls==b[0].b[0].calls, a[3]==b[3], torch.equal(a[0].last,b[0].last), s.captures, s.rung)
    print(s.explain())
