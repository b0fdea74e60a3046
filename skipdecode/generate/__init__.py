"""`skip_generate`: decoding under a schedule, plain or self-speculative, behind transformers' `generate`."""
