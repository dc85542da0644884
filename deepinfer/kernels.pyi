"""For editors in a checkout: `deepinfer.kernels` is the folder kernels/ beside this package.

An installed package has the folder itself in this place and does not ship this file.
"""

from kernels import Explanation as Explanation
from kernels import Implementation as Implementation
from kernels import Layout as Layout
from kernels import Op as Op
from kernels import Ops as Ops
from kernels import Quantised as Quantised
from kernels import Records as Records
from kernels import bind as bind
from kernels import explain as explain
from kernels import get as get
from kernels import names as names
from kernels import register as register
from kernels import use as use
