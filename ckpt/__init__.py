"""Checkpointing and training-state service for large PyTorch training runs."""

__version__ = "0.1.0"
