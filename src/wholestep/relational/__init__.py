"""Relational graph networks: a message function in plain PyTorch; layout, order and kernels are found for it.

from wholestep import relational as rel

graph = rel.RelGraph(src, dst, etype, num_nodes=..., num_relations=...)
layer = rel.layer(message, aggregate="sum")
out = layer(graph, {"x": x}, {"W": W})

Layers that are there already: wholestep.nn.RGCNConv, RGATConv, HGTConv; wholestep.nn.convert_relational(model) puts them in the
place of torch_geometric's.
"""

from wholestep.relational.graph import RelGraph
from wholestep.relational.hetero import Layout
from wholestep.relational.layer import Layer, edge_softmax, layer

__all__ = ["Layer", "Layout", "RelGraph", "edge_softmax", "layer"]
