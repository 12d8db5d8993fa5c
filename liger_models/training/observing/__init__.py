"""What a run reports: metrics, progress, trackers, profiles and utilisation.

May import layers; knows nothing of data, objectives or the loop.
"""
