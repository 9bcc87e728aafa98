"""prefixcache: a forkable prefix cache and parallel sampling for language models."""
