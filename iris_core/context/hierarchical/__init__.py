"""Ranks on several hosts: a symmetric heap on each, and torch's process groups between them."""

from .context import HierarchicalContext
from .rail import Rail, Transfer

__all__ = ["HierarchicalContext", "Rail", "Transfer"]
