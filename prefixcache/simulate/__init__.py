"""What pools of other sizes would give: traces of requests replayed through the real cache code.

No model and no torch. Start reading at `trace.py`, what a trace is; `formats.py` reads one,
`replay.py` runs it through `BlockManager`, `bounds.py` has what to compare it with, `serving.py`
adds time and `memory.py` the memory of lengths alone.
"""
