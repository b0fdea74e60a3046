"""Checkpoints: reading and writing, checksums, exports with fewer layers, and the decoding code that they carry."""
