"""Rewrites of a TrainingGraph, one per file; `pipeline.py` is the ordered table.

`wholestep.passes.default()` is the default pipeline, to be edited and given to `compile(..., passes=...)`.
"""

from wholestep.passes.pipeline import Pipeline, compiler_pass
from wholestep.passes.pipeline import default_passes as default

__all__ = ["Pipeline", "compiler_pass", "default"]
