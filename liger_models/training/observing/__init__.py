"""Monitoring of a run: metrics, progress, trackers, profiles and utilisation.

May import layers; knows nothing of data, objectives or the loop.
"""
