"""Random compositions of parallelism, packing, recomputation and the rest, each compared with one process:
`case.py` says what a composition is, `comparison.py` runs it, `processes.py` runs many, and `shrinking.py`
reduces one that fails.
"""
