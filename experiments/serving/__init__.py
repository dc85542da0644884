"""What serving costs around the model: `python -m experiments.serving.bench`. See README.md."""
