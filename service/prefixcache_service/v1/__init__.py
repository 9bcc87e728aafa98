"""Generated stubs of package prefixcache.v1; `python protos/generate.py` makes them."""
