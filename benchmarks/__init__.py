"""Measurements next to the limits of the machine: ``python -m benchmarks [NAME ...] [--quick]``."""
