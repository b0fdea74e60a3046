"""Systems that decode a test set: checkpoints with a schedule, lossless decoding and confidence exits."""
