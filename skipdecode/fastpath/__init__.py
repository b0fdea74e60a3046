"""The fast path: a decoder layer and its KV cache without what transformers does around them."""
