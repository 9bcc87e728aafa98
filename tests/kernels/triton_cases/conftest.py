"""These cases run on a GPU, or in a process of Triton's interpreter (`test_triton_interpreted`)."""

import torch
import triton

_RUNS = triton.knobs.runtime.interpret or torch.cuda.is_available()
collect_ignore_glob = [] if _RUNS else ["test_*.py"]
