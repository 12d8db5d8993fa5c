"""Processes of a run: ranks and devices, signals, and a watchdog that ends a run whose peers died.

Imports nothing else of the training package.
"""
