"""Resampling, regions of interest and boxes."""
