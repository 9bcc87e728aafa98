"""The CPU fast path: small C++ files, compiled on first use for the machine that is there.

build.py      compiles and caches the library, sharing torch's OpenMP runtime
library.py    its functions and structures, through a plain C ABI
backend.py    `backend.Kernels` on top
linear.cpp    products on weights in their own format
attention.cpp paged attention in spans
rows.cpp      norms, SiLU · mul, rotation with the write of K and V
simd.h        the vector operations that they need
"""
