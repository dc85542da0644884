"""How the nano checkpoint is made and measured: data/, train/, report/. See README.md here."""

from pathlib import Path

WORK = Path(__file__).resolve().parent / "work"  # corpus, tokenizer and runs; git ignores it
