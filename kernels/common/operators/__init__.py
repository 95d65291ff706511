"""Operators: how they are made, checked and called, found again for a product's sizes, and called as torch ops."""
