"""ws::attention and ws::attention_backward: one device-neutral attention with several implementations.

reference.py is the specification, implementations.py and cuda.py wrap the kernels of torch (CPU flash; cuDNN,
flash, efficient), choice.py asks the tuner for one, trial.py is what they are tried on, operator.py registers the operators,
biased.py is attention with a learned bias (a kernel of our own), sdpa.py is the drop-in for torch's function.
"""

from wholestep.ops.attention import biased as biased
from wholestep.ops.attention import operator as operator
from wholestep.ops.attention.choice import choose
from wholestep.ops.attention.sdpa import scaled_dot_product_attention

__all__ = ["choose", "scaled_dot_product_attention"]
