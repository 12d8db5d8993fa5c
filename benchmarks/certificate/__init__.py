"""Random compositions of parallelism, packing, recomputation and the rest, each compared with one process:
`case.py` defines compositions, `comparison.py` runs it, `processes.py` runs many, and `shrinking.py`
reduces one that fails.
"""
