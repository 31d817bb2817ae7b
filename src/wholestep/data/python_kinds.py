"""What the graph of the Python library holds, by name (data/pygraph.py); sizes of a model are known before torch is loaded."""

from __future__ import annotations

FILES = 300
KINDS = ("module", "class", "function", "method")
RELATIONS = ("contains", "imports", "calls", "inherits")
"""Relation r + 4 is relation r turned round."""
