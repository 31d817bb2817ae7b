"""How many bytes a step takes: predicted from the graph, and measured of its compiled regions on stand-ins."""
