"""Bytes in and out: local direct I/O and object stores."""
