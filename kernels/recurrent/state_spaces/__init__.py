"""State spaces: the scans of Mamba (`selective_scan`) and of Mamba 2 (`ssd`).

May import the folder above; the operations are exported by `liger_models.kernels`.
"""
