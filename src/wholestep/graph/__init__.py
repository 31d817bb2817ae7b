"""The captured training step as data: the graph, the roles of its inputs, what is known about each node.

Nothing is imported here: sizes and plans are read by commands that must answer before torch is loaded.
"""
