"""The six swappable slots: protocols, registry and one folder a slot."""
