"""The compiled kernels' functions and structures, as ctypes sees them. Owns the ABI only."""

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path


class Kind(IntEnum):
    """Formats of packed weights, in the order of `formats.h`."""

    F32 = 0
    BF16 = 1
    F16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q8_0_INT8 = 6
    Q4_0_INT8 = 7
    Q4_1_INT8 = 8


class Matrix(ctypes.Structure):
    """`kernels.h: Matrix`."""

    _fields_ = [("kind", c_int64), ("outputs", c_int64), ("tiles", c_void_p)]


class LinearLayer(ctypes.Structure):
    """`kernels.h: Linear`."""

    _fields_ = [
        *(("depth", c_int64), ("outputs", c_int64), ("bias", c_void_p)),
        *(("count", c_int64), ("matrices", POINTER(Matrix))),
    ]


class CacheShape(ctypes.Structure):
    """`kernels.h: CacheShape`."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "block_size")),
        *((name, c_int64) for name in ("k_block", "k_head", "k_dim")),
        *((name, c_int64) for name in ("v_block", "v_head", "v_slot")),
    ]


class AttentionWork(ctypes.Structure):
    """`kernels.h: AttentionWork`."""

    _fields_ = [
        ("window", c_int64),
        ("items", c_void_p),
        ("item_count", c_int64),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("first_span", c_void_p),
        ("partial_base", c_void_p),
        ("tokens", c_int64),
        ("block_table", c_void_p),
        ("table_width", c_int64),
        ("partials", c_void_p),
    ]


class Rope(ctypes.Structure):
    """`kernels.h: Rope`."""

    _fields_ = [(name, c_void_p) for name in ("positions", "slots", "table")]


class HeadNorms(ctypes.Structure):
    """`kernels.h: HeadNorms`."""

    _fields_ = [("q", c_void_p), ("k", c_void_p), ("eps", c_float)]


class LayerWeights(ctypes.Structure):
    """`layers.cpp: Layer`."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm")),
        *((name, LinearLayer) for name in ("qkv", "output", "gate_up", "down")),
        ("head_norms", HeadNorms),
    ]


class DecoderWeights(ctypes.Structure):
    """`layers.cpp: Decoder`."""

    _fields_ = [
        *(("count", c_int64), ("hidden", c_int64), ("layers", POINTER(LayerWeights))),
        *(("final_norm", c_void_p), ("eps", c_float)),
    ]


class Step(ctypes.Structure):
    """`layers.cpp: Step`."""

    _fields_ = [
        *(("tokens", c_int64), ("wanted", c_int64), ("wanted_rows", c_void_p)),
        *(("rope", Rope), ("shape", CacheShape), ("works", POINTER(POINTER(AttentionWork)))),
        *(("k_caches", POINTER(c_void_p)), ("v_caches", POINTER(c_void_p))),
    ]


class Library:
    """The functions, typed. One object a loaded file."""

    def __init__(self, path: Path) -> None:
        """Load a library of `build`. Raises OSError if it cannot be loaded."""
        self._dll = dll = ctypes.CDLL(str(path))
        pointer, size = c_void_p, c_int64
        self.linear_bytes = dll.prefixcache_linear_bytes
        self.linear_bytes.argtypes, self.linear_bytes.restype = [c_int, size, size], size
        self.linear_scratch = dll.prefixcache_linear_scratch
        self.linear_scratch.argtypes = [POINTER(LinearLayer), size]
        self.linear_scratch.restype = size
        self.linear_pack = dll.prefixcache_linear_pack
        self.linear_pack.argtypes = [c_int, pointer, size, size, size, pointer, c_int]
        self.linear_rows = dll.prefixcache_linear_rows
        self.linear_rows.argtypes = [c_int, pointer, size, pointer, size, pointer, c_int]
        self.linear = dll.prefixcache_linear
        self.linear.argtypes = [POINTER(LinearLayer), pointer, size, pointer, pointer, c_int]
        self.rms_norm = dll.prefixcache_rms_norm
        self.rms_norm.argtypes = [*[pointer] * 3, c_float, pointer, size, size, c_int]
        self.silu_mul = dll.prefixcache_silu_mul
        self.silu_mul.argtypes = [pointer, pointer, size, size, c_int]
        self.rope_write_kv = dll.prefixcache_rope_write_kv
        self.rope_write_kv.argtypes = [
            *(pointer, size, POINTER(Rope), POINTER(CacheShape), POINTER(HeadNorms)),
            *(pointer, pointer, c_int),
        ]
        self.attention_partials = dll.prefixcache_attention_partials
        self.attention_partials.argtypes = [size, size, size]
        self.attention_partials.restype = size
        self.attention = dll.prefixcache_attention
        self.attention.argtypes = [
            *(POINTER(CacheShape), POINTER(AttentionWork), pointer, size),
            *(pointer, pointer, pointer, c_int),
        ]
        self.layers_scratch = dll.prefixcache_layers_scratch
        self.layers_scratch.argtypes = [POINTER(DecoderWeights), size]
        self.layers_scratch.restype = size
        self.layers = dll.prefixcache_layers
        self.layers.argtypes = [
            *(POINTER(DecoderWeights), POINTER(Step), pointer, pointer, pointer, c_int),
        ]
        dll.prefixcache_attention_pairs.restype = size
        self.attention_pairs = int(dll.prefixcache_attention_pairs())
        for function in (
            *(self.linear_pack, self.linear_rows, self.linear, self.rms_norm),
            *(self.silu_mul, self.rope_write_kv, self.attention, self.layers),
        ):
            function.restype = None


ITEM_FIELDS = 5
"""int32 fields of `kernels.h: AttentionItem`: span, table_row, first, pair, pairs."""
