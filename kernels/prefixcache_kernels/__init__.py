"""Paged kernels: arrays in, arrays out. Nothing here knows of tries, sequences or requests."""
