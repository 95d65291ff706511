"""How `auto` chooses.

| file | what |
|---|---|
| `auto.py` | the variant `auto` |
| `measured.py`, `measured_times` | times that were measured, and those that are shipped |
| `knowledge.py` | what is known of a machine |
| `ranking.py` | how the variants of a product compare, by its number of rows |
| `choices.py` | what that comes to, which all ranks have from rank 0 |
| `corrections.py` | predicted times, corrected by measured ones near them, and how far off they may be |
| `tuning_cache.py` | times measured on this machine |
"""
