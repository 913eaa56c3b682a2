"""The ckpt command."""
