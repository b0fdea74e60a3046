"""Support for training: the order of a model's layers, and batches of prompts and completions."""
