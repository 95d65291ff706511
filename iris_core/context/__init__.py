"""A rank's handle on the heap and on the other ranks, and how a process opens it."""

from .context import Context, context_named

__all__ = ["Context", "context_named"]
