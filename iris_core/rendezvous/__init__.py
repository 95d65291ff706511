"""How the ranks of one host find each other and exchange messages outside kernels."""
