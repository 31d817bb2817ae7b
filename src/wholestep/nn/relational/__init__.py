"""Layers of relational graph networks with the arguments, parameters and results of torch_geometric's, which is not needed.

    conv = wholestep.nn.RGCNConv(16, 32, num_relations=4)
    out = conv(x, edge_index, edge_type)       # or conv(x, graph) with a relational.RelGraph
    report = wholestep.nn.convert_relational(model)

Each is a message function given to `relational.layer`, so that products are made once per pair, on the better side.
"""
