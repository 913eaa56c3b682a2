"""The trainer's child: arena to sealed segment. A program of its own (python -m ckpt.flusher)."""
