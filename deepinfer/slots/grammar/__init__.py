"""Grammar slot: which tokens may come next.

none.py     every token (default)
"""

from deepinfer.slots.grammar.none import Free, NoGrammar
from deepinfer.slots.registry import registry

register = registry("grammar").register
__all__ = ["Free", "NoGrammar", "register"]
