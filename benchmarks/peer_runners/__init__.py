"""Runners of `benchmarks.peers`: one script a server, run by that server's own interpreter.

The `run_*.py` scripts and `_loop.py` import nothing of ours (but `run_ours.py`), since their
interpreters have nothing of ours; `environments.py` and `floors.py` are for `peers.py` itself.
"""
