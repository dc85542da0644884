"""Measuring: tables with provenance, comparisons, traces. Nothing here is needed to run a model."""
