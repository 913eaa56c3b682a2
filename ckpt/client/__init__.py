"""Typed gRPC clients of the staging server."""
