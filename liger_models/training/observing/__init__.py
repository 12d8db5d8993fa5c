"""Monitoring of a run: metrics, progress, trackers, profiles and utilisation.

May import models and the tokenizer; knows nothing of data, objectives or the loop.
"""
