"""One operator, one home: importing this package registers the operators of the library `ws` and says what is known of them.

Out: `record_of` (record.py), and views over all records: `IN_PLACE` (functional update -> Python function that updates parameters
and states in place), `DECOMPOSITIONS` (overload -> aten arithmetic that Inductor fuses), `IN_ORDER` (overload -> the same sum in
an order that repeats itself). Importing touches no GPU and does not import Triton.
"""

from wholestep.ops import (
    add_rows,
    aten,
    attention,
    clip,
    collectives,
    ctc,
    draw,
    dropout,
    grouped_mm,
    linear_cross_entropy,
    linear_cross_entropy_record,
    offload,
    packed_recurrent,
    random_bits,
    recurrent,
    relational,
    require,
    scatter_shared,
    sparse_mm,
    traffic,
)
from wholestep.ops.record import overloads, record_of

IN_PLACE = overloads("in_place")
DECOMPOSITIONS = overloads("decomposition")
IN_ORDER = overloads("in_order")

__all__ = [
    "DECOMPOSITIONS", "IN_ORDER", "IN_PLACE", "add_rows", "aten", "attention", "clip", "collectives", "ctc", "draw", "dropout",
    "grouped_mm", "linear_cross_entropy", "linear_cross_entropy_record", "offload", "packed_recurrent", "random_bits", "record_of",
    "recurrent", "relational", "require", "scatter_shared", "sparse_mm", "traffic",
]  # fmt: skip
