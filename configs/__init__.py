"""Pieces that recipes and commands name, and what reads them: files by name, shapes of models."""
