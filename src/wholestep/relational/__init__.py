"""Relational graph networks: a message function in plain PyTorch; layout, order and kernels are found for it.

from wholestep import relational as rel

graph = rel.RelGraph(src, dst, etype, num_nodes=..., num_relations=...)
layer = rel.layer(message, aggregate="sum")
out = layer(graph, {"x": x}, {"W": W})
for block in rel.blocks(graph, seeds, fanout=(10, 10), batch_size=1024): ...

Layers that are there already: wholestep.nn.RGCNConv, RGATConv, HGTConv; wholestep.nn.convert_relational(model) puts them in the
place of torch_geometric's.
"""

from wholestep.relational.blocks import Block, Blocks, blocks
from wholestep.relational.graph import RelGraph
from wholestep.relational.hetero import Layout
from wholestep.relational.layer import Layer, layer
from wholestep.relational.messages import edge_softmax

__all__ = ["Block", "Blocks", "Layer", "Layout", "RelGraph", "blocks", "edge_softmax", "layer"]
