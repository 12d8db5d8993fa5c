"""State spaces: the scans of Mamba (`selective_scan`) and of Mamba 2 (`ssd`).

Import operations from `liger_models.kernels`.
"""
