"""Kernels: one folder an operation, imported as ``deepinfer.kernels``."""
