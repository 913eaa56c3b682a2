"""Checkpointing inside a PyTorch training loop."""
