"""What the model remembers: block KV in pages, state KV in position-addressed rings, and LayerKV over both."""
