"""Operators of relational graph networks: rows that are taken, sums and products over the edges of a table, softmax per node.

Each is a small functional operator with a derivative of the same kind; nothing is added by atomic operations, so bits repeat.
"""

from wholestep.ops.relational import cells, gather, linear_sum, products, softmax

__all__ = ["cells", "gather", "linear_sum", "products", "softmax"]
