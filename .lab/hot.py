import time, gc, sys, types, logging, torch, torch._dynamo as dynamo, transformers
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
layers=24
torch.manual_seed(0)
kind=sys.argv[1] if len(sys.argv)>1 else "gpt2"
if kind=="gpt2":
    cfg=transformers.GPT2Config(vocab_size=101,n_embd=32,n_layer=layers,n_head=4,n_positions=32,use_cache=False,attn_implementation="sdpa",bos_token_id=0,eos_token_id=1)
    m=transformers.GPT2LMHeadModel(cfg)
else:
    cfg=transformers.LlamaConfig(vocab_size=101,hidden_size=32,num_hidden_layers=layers,num_attention_heads=4,num_key_value_heads=2,intermediate_size=64,use_cache=False,attn_implementation="sdpa")
    m=transformers.LlamaForCausalLM(cfg)
b={"input_ids":torch.randint(0,100,(2,16))}; b["labels"]=b["input_ids"]
class Stop(Exception): pass
def backend(gm, ex):
    def run(*a): raise Stop
    return run
def f(loss_fn, model,batch): return loss_fn(model, batch)
def loss(model,batch): return model(**batch).loss
def measure(**C):
    seen=[]
    def filt(entries):
        seen.extend(entries); return [True]*len(entries)
    g=types.FunctionType(f.__code__.replace(co_name=f"f{time.time_ns()}"),{"__builtins__":__builtins__})
    c=torch.compile(g,backend=backend,fullgraph=True,options={"guard_filter_fn":filt})
    C=dict(ignore_logging_functions={logging.Logger.warning_once}, allow_unspec_int_on_nn_module=True, trace_autograd_ops=True)|C
    t=time.perf_counter()
    with dynamo.config.patch(**C):
        try: c(loss,m,b)
        except Stop: pass
    dt=time.perf_counter()-t
    es=_debug_get_cache_entry_list(g.__code__)
    gm=es[0].guard_manager
    loc={"loss_fn":loss,"model":m,"batch":b}
    assert gm.check(loc), gm.check_verbose(loc)
    for _ in range(50): gm.check(loc)
    t=time.perf_counter()
    for _ in range(500): gm.check(loc)
    us=(time.perf_counter()-t)/500*1e6
    import collections
    print(f"{us:.0f} us", f"compile {dt:.2f}", len(seen), collections.Counter(e.guard_type for e in seen).most_common(8))
    return gm,seen
measure()
measure(skip_nnmodule_hook_guards=False)
measure(skip_nnmodule_hook_guards=False, skip_no_tensor_aliasing_guards_on_parameters=False)
measure(skip_nnmodule_hook_guards=False, skip_no_tensor_aliasing_guards_on_parameters=False, use_recursive_dict_tags_for_guards=True)
measure(skip_nnmodule_hook_guards=True, skip_no_tensor_aliasing_guards_on_parameters=True, use_recursive_dict_tags_for_guards=True)
