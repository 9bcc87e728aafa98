"""One module a figure of the README; each runs as `python -m benchmarks.NAME --json`."""
