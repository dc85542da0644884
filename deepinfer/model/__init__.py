"""The layer stack: one forward over a flat batch of rows serves prefill, decode, verify and
training."""
