"""The verbs, one a file. Importing this package registers them, in the order in which `sch.help()` lists them."""

from wholestep.schedule.verbs.replace import replace  # isort: skip
from wholestep.schedule.verbs.replace_all import replace_all  # isort: skip
from wholestep.schedule.verbs.fuse import fuse  # isort: skip
from wholestep.schedule.verbs.decompose import decompose  # isort: skip
from wholestep.schedule.verbs.recompute import recompute  # isort: skip
from wholestep.schedule.verbs.precision import precision  # isort: skip
from wholestep.schedule.verbs.kernel import kernel  # isort: skip
from wholestep.schedule.verbs.shard import shard  # isort: skip
from wholestep.schedule.verbs.sync import sync  # isort: skip
from wholestep.schedule.verbs.fork_rng import fork_rng  # isort: skip
from wholestep.schedule.verbs.pipeline_cut import pipeline_cut  # isort: skip
from wholestep.schedule.verbs.offload import offload  # isort: skip
from wholestep.schedule.verbs.annotate import annotate  # isort: skip
from wholestep.schedule.verbs.cudagraph import cudagraph  # isort: skip
from wholestep.schedule.verbs.print_values import print_values  # isort: skip

__all__ = [
    "annotate", "cudagraph", "decompose", "fork_rng", "fuse", "kernel", "offload", "pipeline_cut", "precision", "print_values",
    "recompute", "replace", "replace_all", "shard", "sync",
]  # fmt: skip
