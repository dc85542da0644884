"""Studies built on deepinfer. They import it; it never imports them."""
