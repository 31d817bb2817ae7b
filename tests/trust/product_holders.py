"""Where a value is held: parts from which `product.py` makes trainings, in text.

A part begins with `== name`: lines that make it of `first`, `-> ` the expression that reads it, `<- ` lines that write `new` to it
(where there are none the expression is assigned to), and `!! ` its declaration in functions that write.
"""

from __future__ import annotations

HOLDERS = r"""
== global
global held
held = first
-> held
!! global held
== closure
held = first
-> held
!! nonlocal held
== closure of a closure
held = first
def get():
    return (lambda: held)()
-> get()
<- held = new
!! nonlocal held
== attribute
class Config:
    gain = 1.0
config = Config()
config.gain = first
-> config.gain
== attribute by name
class Config:
    gain = 1.0
config = Config()
config.gain = first
-> getattr(config, 'ga' + 'in')
<- config.gain = new
== attribute by table
class Config:
    gain = 1.0
config = Config()
config.gain = first
-> vars(config)['gain']
<- config.gain = new
== attribute by getter
class Config:
    gain = 1.0
config = Config()
config.gain = first
-> operator.attrgetter('gain')(config)
<- config.gain = new
== object replaced
class Config:
    gain = 1.0
config = Config()
config.gain = first
-> config.gain
<- config = Config()
<- config.gain = new
!! nonlocal config
== class attribute
class Config:
    gain = first
-> Config.gain
== class attribute by object
class Config:
    gain = first
config = Config()
-> config.gain
<- Config.gain = new
== class attribute by heir
class Config:
    gain = first
class Heir(Config):
    pass
config = Heir()
-> config.gain
<- Config.gain = new
== class in a class
class Config:
    class Inner:
        gain = first
-> Config.Inner.gain
== class of a registry
class Config:
    gain = first
table = {'a': Config}
-> table['a'].gain
<- Config.gain = new
== class of a registry replaced
def make(value):
    class Config:
        gain = value
    return Config
table = {'a': make(first)}
-> table['a']().gain
<- table['a'] = make(new)
== singleton
class Config:
    one = None
    @classmethod
    def get(cls):
        return cls.one
Config.one = Config()
Config.one.gain = first
-> Config.get().gain
== slots
class Config:
    __slots__ = ('gain',)
config = Config()
config.gain = first
-> config.gain
== dataclass
@dataclasses.dataclass
class Config:
    gain: object = 1.0
config = Config(first)
-> config.gain
== dataclass with slots
@dataclasses.dataclass(slots=True)
class Config:
    gain: object = 1.0
config = Config(first)
-> config.gain
== frozen dataclass
@dataclasses.dataclass(frozen=True)
class Config:
    gain: object = 1.0
config = Config(first)
-> config.gain
<- config = dataclasses.replace(config, gain=new)
!! nonlocal config
== frozen dataclass written past
@dataclasses.dataclass(frozen=True)
class Config:
    gain: object = 1.0
config = Config(first)
-> config.gain
<- object.__setattr__(config, 'gain', new)
== dataclass as a dictionary
@dataclasses.dataclass
class Config:
    gain: object = 1.0
config = Config(first)
-> dataclasses.asdict(config)['gain']
<- config.gain = new
== named tuple
Config = collections.namedtuple('Config', 'gain')
config = Config(first)
-> config.gain
<- config = config._replace(gain=new)
!! nonlocal config
== named tuple unpacked
Config = collections.namedtuple('Config', 'gain rest')
config = Config(first, 0)
-> (lambda gain, rest: gain)(*config)
<- config = config._replace(gain=new)
!! nonlocal config
== namespace
config = types.SimpleNamespace(gain=first)
-> config.gain
== arguments
config = argparse.Namespace(gain=first)
-> config.gain
== dictionary
table = {'gain': first}
-> table['gain']
== dictionary by get
table = {'gain': first}
-> table.get('gain', 1.0)
<- table['gain'] = new
== dictionary updated
table = {'gain': first}
-> table['gain']
<- table.update(gain=new)
== dictionary replaced
table = {'gain': first}
-> table['gain']
<- table = {**table, 'gain': new}
!! nonlocal table
== dictionary copied
table = {'gain': first}
-> {**table}['gain']
<- table['gain'] = new
== dictionary as keywords
table = {'gain': first}
-> (lambda **kw: kw['gain'])(**table)
<- table['gain'] = new
== dictionary walked over
table = {'gain': first}
-> next(iter(table.values()))
<- table['gain'] = new
== items walked over
table = {'gain': first}
-> [v for k, v in table.items() if k == 'gain'][0]
<- table['gain'] = new
== key of a dictionary
table = {first: 'gain'}
-> next(iter(table))
<- table.clear()
<- table[new] = 'gain'
== nested dictionaries
table = {'a': {'b': [{'gain': first}]}}
-> table['a']['b'][0]['gain']
== nested dictionary replaced
table = {'a': {'gain': first}}
-> table['a']['gain']
<- table['a'] = {'gain': new}
== dictionary in a tuple
table = ({'gain': first},)
-> table[0]['gain']
== list
table = [first, 0]
-> table[0]
== list from the end
table = [0, first]
-> table[-1]
== list appended to
table = [first]
-> table[-1]
<- table.append(new)
== list in a tuple
table = ([first],)
-> table[0][0]
== list unpacked
table = [first, 0, 0]
-> (lambda a, *rest: a)(*table)
<- table[0] = new
== list walked over
table = [first]
-> [v for v in table][0]
<- table[0] = new
== list zipped
table = [first]
-> [b for a, b in zip(range(1), table)][0]
<- table[0] = new
== list reversed
table = [first]
-> list(reversed(table))[0]
<- table[0] = new
== list of objects
class Config:
    gain = 1.0
config = Config()
config.gain = first
table = [config]
-> [c.gain for c in table][0]
<- table[0].gain = new
== tuple replaced
table = (first, 0)
-> table[0]
<- table = (new, 0)
!! nonlocal table
== ordered dictionary
table = collections.OrderedDict(gain=first)
-> table['gain']
== default dictionary
table = collections.defaultdict(int, gain=first)
-> table['gain']
== chain map
table = collections.ChainMap({}, {'gain': first})
-> table['gain']
== chain map below
table = collections.ChainMap({}, {'gain': first})
-> table['gain']
<- table.maps[1]['gain'] = new
== mapping proxy
inner = {'gain': first}
table = types.MappingProxyType(inner)
-> table['gain']
<- inner['gain'] = new
== user dictionary
table = collections.UserDict(gain=first)
-> table['gain']
== deque
table = collections.deque([first])
-> table[0]
== array of numpy
table = np.array([0.5 if isinstance(first, (str, type(None))) else first], dtype=np.float64)
-> float(table[0])
<- table[0] = new
== dictionary of numpy's numbers
table = {'gain': np.float64(0.5 if isinstance(first, (str, type(None))) else first)}
-> table['gain']
<- table['gain'] = np.float64(new)
== function attribute
def get():
    return get.gain
get.gain = first
-> get()
<- get.gain = new
== default
def get(gain=first):
    return gain
-> get()
<- get.__defaults__ = (new,)
== keyword default
def get(*, gain=first):
    return gain
-> get()
<- get.__kwdefaults__['gain'] = new
== mutable default
def get(table=[first]):
    return table[0]
-> get()
<- get.__defaults__[0][0] = new
== partial
get = functools.partial(lambda v: v, first)
-> get()
<- get = functools.partial(lambda v: v, new)
!! nonlocal get
== partial with keywords
get = functools.partial(lambda v: v, v=first)
-> get()
<- get.keywords['v'] = new
== lambda replaced
get = lambda v=first: v
-> get()
<- get = lambda v=new: v
!! nonlocal get
== function made in a function
def make(v):
    def get():
        return v
    return get
get = make(first)
-> get()
<- get = make(new)
!! nonlocal get
== bound method
class Config:
    gain = 1.0
config = Config()
config.gain = first
Config.get = lambda self: self.gain
get = config.get
-> get()
<- config.gain = new
== callable object
class Config:
    gain = 1.0
config = Config()
config.gain = first
Config.__call__ = lambda self: self.gain
-> config()
<- config.gain = new
== property
class Config:
    gain = 1.0
config = Config()
config.gain = first
Config.twice = property(lambda self: self.gain)
-> config.twice
<- config.gain = new
== property with a setter
class Config:
    def __init__(self):
        self._gain = first
    @property
    def gain(self):
        return self._gain
    @gain.setter
    def gain(self, v):
        self._gain = v
config = Config()
-> config.gain
== cached property
class Config:
    base = first
    @functools.cached_property
    def gain(self):
        return self.base
config = Config()
-> config.gain
<- config.base = new
<- vars(config).pop('gain', None)
== cached property set
class Config:
    base = first
    @functools.cached_property
    def gain(self):
        return self.base
config = Config()
-> config.gain
== descriptor
class Field:
    def __get__(self, owner, kind=None):
        return owner.table['gain']
    def __set__(self, owner, v):
        owner.table['gain'] = v
class Config:
    gain = Field()
    def __init__(self):
        self.table = {}
config = Config()
config.gain = first
-> config.gain
== descriptor that holds
class Field:
    def __get__(self, owner, kind=None):
        return self.held
    def __set__(self, owner, v):
        self.held = v
class Config:
    gain = Field()
config = Config()
config.gain = first
-> config.gain
== missing attribute answered
class Config:
    def __init__(self):
        self.table = {'gain': first}
    def __getattr__(self, name):
        try:
            return self.__dict__['table'][name]
        except KeyError:
            raise AttributeError(name)
config = Config()
-> config.gain
<- config.table['gain'] = new
== items answered
class Config:
    def __init__(self):
        self.table = {'gain': first}
    def __getitem__(self, name):
        return self.table[name]
config = Config()
-> config['gain']
<- config.table['gain'] = new
== dictionary with attributes
class Config(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
config = Config(gain=first)
-> config.gain
== dictionary that is its attributes
class Config(dict):
    def __init__(self, **kw):
        super().__init__(**kw)
        self.__dict__ = self
config = Config(gain=first)
-> config.gain
== dictionary of its own
class Config(dict):
    pass
config = Config(gain=first)
-> config['gain']
== list of its own
class Config(list):
    pass
config = Config([first])
-> config[0]
== metaclass attribute
class Meta(type):
    gain = first
class Config(metaclass=Meta):
    pass
-> Config.gain
<- Meta.gain = new
== metaclass property
class Meta(type):
    held = first
    @property
    def gain(cls):
        return cls.held
class Config(metaclass=Meta):
    pass
-> Config.gain
<- Meta.held = new
== member of an enum
class Mode(enum.Enum):
    A = 1
Mode.A.gain = first
-> Mode.A.gain
== weak reference
class Config:
    gain = 1.0
config = Config()
config.gain = first
ref = weakref.ref(config)
-> ref().gain
<- config.gain = new
== weak proxy
class Config:
    gain = 1.0
config = Config()
config.gain = first
ref = weakref.proxy(config)
-> ref.gain
<- config.gain = new
== weak dictionary
class Config:
    gain = 1.0
config = Config()
config.gain = first
table = weakref.WeakValueDictionary(a=config)
-> table['a'].gain
<- config.gain = new
== weak keys
class Config:
    gain = 1.0
config = Config()
config.gain = first
table = weakref.WeakKeyDictionary()
table[config] = first
-> table[config]
== context variable
var = contextvars.ContextVar('gain')
var.set(first)
-> var.get()
<- var.set(new)
== thread's own
local = threading.local()
local.gain = first
-> local.gain
== module of python
settings = types.ModuleType('product_settings')
sys.modules['product_settings'] = settings
settings.gain = first
-> settings.gain
== module imported
settings = types.ModuleType('product_settings')
sys.modules['product_settings'] = settings
settings.gain = first
-> __import__('importlib').import_module('product_settings').gain
<- settings.gain = new
== model
model.gain = first
-> model.gain
== module at hand
for m in model.modules():
    m.gain = first
-> at.gain
<- target.gain = new
== module's config
class Config:
    gain = 1.0
config = Config()
config.gain = first
for m in model.modules():
    m.config = Config()
    m.config.gain = first
-> at.config.gain
<- target.config.gain = new
== module's dictionary
for m in model.modules():
    m.table = {'gain': first}
-> at.table['gain']
<- target.table['gain'] = new
== module's list
for m in model.modules():
    m.table = [first]
-> at.table[0]
<- target.table[0] = new
== module's class
Model.gain = first
-> model.gain
<- Model.gain = new
== module's property
model.held = first
Model.gain = property(lambda self: self.held)
-> model.gain
<- model.held = new
== shadowed on the module
Model.gain = first
-> model.gain
== parameter's attribute
model.a.weight.gain = first
-> model.a.weight.gain
== buffer's attribute
model.register_buffer('table', torch.zeros(1))
model.table.gain = first
-> model.table.gain
== teacher's attribute
teacher = nn.Linear(2, 2)
teacher.gain = first
-> teacher.gain
== module in a list
layers = [nn.Linear(2, 2)]
layers[0].gain = first
-> layers[0].gain
== batch
-> batch[2]
== batch's dictionary
-> batch[3]['gain']
== text
held = repr(first)
-> ast_eval(held)
<- held = repr(new)
!! nonlocal held
== group of the optimizer
optimizer.param_groups[0]['gain'] = first
-> optimizer.param_groups[0]['gain']
== optimizer's attribute
optimizer.gain = first
-> optimizer.gain
== copied object
class Config:
    gain = 1.0
config = Config()
config.gain = first
-> copy.copy(config).gain
<- config.gain = new
== signature
def get(gain=first):
    pass
-> inspect.signature(get).parameters['gain'].default
<- get.__defaults__ = (new,)
== annotation
def get():
    pass
get.__annotations__['gain'] = first
-> get.__annotations__['gain']
== missing key caught
table = {}
if first is not None:
    table['gain'] = first
def get():
    try:
        return table['gain']
    except KeyError:
        return None
-> get()
<- if new is None:
<-     table.pop('gain', None)
<- else:
<-     table['gain'] = new
== missing attribute caught
class Config:
    pass
config = Config()
if first is not None:
    config.gain = first
def get():
    try:
        return config.gain
    except AttributeError:
        return None
-> get()
<- if new is None:
<-     vars(config).pop('gain', None)
<- else:
<-     config.gain = new
== attribute or none
class Config:
    pass
config = Config()
if first is not None:
    config.gain = first
-> getattr(config, 'gain', None)
<- if new is None:
<-     vars(config).pop('gain', None)
<- else:
<-     config.gain = new
== attribute or none of the model
if first is not None:
    model.gain = first
-> getattr(model, 'gain', None)
<- if new is None:
<-     vars(model).pop('gain', None)
<- else:
<-     model.gain = new
== entry or none
table = {}
if first is not None:
    table['gain'] = first
-> table['gain'] if 'gain' in table else None
<- if new is None:
<-     table.pop('gain', None)
<- else:
<-     table['gain'] = new
== stack
stack = [first]
-> stack[-1]
<- stack.pop()
<- stack.append(new)
== shadowing instance
class Config:
    gain = first
config = Config()
-> config.gain
== two objects swapped
class Config:
    gain = 1.0
config = Config()
config.gain = first
other = Config()
other.gain = first
-> config.gain
<- config, other = other, config
<- config.gain = new
!! nonlocal config, other
== dataclass with a factory
@dataclasses.dataclass
class Inner:
    gain: object = first
@dataclasses.dataclass
class Config:
    inner: Inner = dataclasses.field(default_factory=Inner)
config = Config()
-> config.inner.gain
== abstract property
class Base(abc.ABC):
    @property
    @abc.abstractmethod
    def gain(self):
        ...
class Config(Base):
    held = first
    @property
    def gain(self):
        return self.held
config = Config()
-> config.gain
<- config.held = new
== generator's list
table = [first]
def every():
    yield from table
-> next(every())
<- table[0] = new
== static method
class Config:
    table = [first]
    @staticmethod
    def get():
        return Config.table[0]
-> Config.get()
<- Config.table[0] = new
== class method of an heir
class Config:
    gain = first
    @classmethod
    def get(cls):
        return cls.gain
class Heir(Config):
    pass
-> Heir.get()
<- Heir.gain = new
== super
class Base:
    gain = first
    def get(self):
        return self.gain
class Config(Base):
    def get(self):
        return super().get()
config = Config()
-> config.get()
<- Base.gain = new
"""
