"""deepinfer: DeepInfer as a research framework. `import deepinfer as di`."""

__version__ = "0.1.0"
