"""The decoder, its weights and tokenizer, the KV tensors and the attention metadata."""
