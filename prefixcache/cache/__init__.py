"""The cache: block pool, prefix trie, block tables, fork, eviction, events. No torch."""
