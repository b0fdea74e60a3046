"""Linear layers and fused operations, on CPU and GPU, in full or reduced precision."""
