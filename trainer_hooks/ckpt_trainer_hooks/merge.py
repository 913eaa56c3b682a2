"""Plain values of several ranks put together; the rule is the format's, so it is kept there."""

from ckpt.format.states import merge_values

__all__ = ["merge_values"]
