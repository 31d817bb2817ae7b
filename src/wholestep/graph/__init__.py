"""The captured training step as data: the graph, the roles of its inputs, what is known about each node."""

from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

__all__ = ["Input", "Output", "OutputKind", "Role", "TrainingGraph"]
