"""How the nano checkpoint is made and measured. See README.md in this folder."""
