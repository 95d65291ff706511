"""Kernels with one signal, wait, fence, barrier or order less, and what notices: ``make mutants``, outside the suite.

Each mutant is made in a copy of the tree, in a process of its own, and is put through the cheapest tests first that
know the variants it reaches, until one fails. One that none notices has survived: a test is missing, or the line is
needed by nothing that can be observed, which explained.py then says.
"""
