"""Picking, placing and rearranging elements by index."""
