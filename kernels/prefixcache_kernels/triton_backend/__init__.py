"""The Triton kernels and the backend on top of them. Importing this imports Triton.

rows.py             RMSNorm with the residual, SiLU · up
linear.py           the linear layer of --batch-invariant
write_kv.py         new K and V into their slots, with the rotation before it
copy_blocks.py      copy-on-write
paged_attention.py  attention, over the work items of attention_work.py in the buffers of plan.py
twins.py            what `reference` has no twin of
"""

from prefixcache_kernels.triton_backend.backend import TritonKernels

__all__ = ["TritonKernels"]
