"""fp8 operands and their scales, on the host.

| file | what |
|---|---|
| `scales.py` | of what an operand has a scale each, their shapes; quantising and back with torch |
| `quantise.py` | rows in fp8 over a scale each, by one kernel (../portable/quantise.py) |
| `scaled_mm.py` | the product by torch, for baselines |
"""
