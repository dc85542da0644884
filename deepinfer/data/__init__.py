"""The texts that the nano model is judged on, the same on every machine and Python version.

    di.data.heldout()    28 standard library modules that it was never trained on
    di.data.dev()        9 others: every choice was made on these
    di.data.prose()      a second domain: the help topics of Python, and its licence

Each returns a new list of `Text`, a string that knows its file:

    eng.generate(di.data.heldout()[:4], max_tokens=64)                # one passage a module
    di.data.heldout(characters=7000, count=64)                        # 64 passages, all long enough
    eng.score(di.data.heldout(characters=None))                       # every file whole

Figures are published on whole files. Source, licence and hashes: README.md in this folder.
"""

from deepinfer.data.texts import Text, dev, heldout, prose, xz_bits_per_byte

__all__ = ["Text", "dev", "heldout", "prose", "xz_bits_per_byte"]
