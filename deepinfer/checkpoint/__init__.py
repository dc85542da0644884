"""Checkpoints in the official layout: names, storage formats, reading, loading and writing."""
