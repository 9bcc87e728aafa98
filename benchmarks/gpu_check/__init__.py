"""What only a GPU can show, in one run of under eight minutes: see `__main__`."""
