"""`skip_generate`: decoding under a schedule, plain or self-speculative, called by transformers' `generate`."""
