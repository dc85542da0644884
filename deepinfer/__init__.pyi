"""The public names, for editors and type checkers. The run-time list is `_WHERE` in __init__.py."""

from deepinfer import data as data
from deepinfer import kernels as kernels
from deepinfer import measure as measure
from deepinfer.compat.llm import LLM as LLM
from deepinfer.config import EngineConfig as EngineConfig
from deepinfer.config import ModelConfig as ModelConfig
from deepinfer.conformance import check as check
from deepinfer.engine.completion import Completion as Completion
from deepinfer.engine.completion import Completions as Completions
from deepinfer.engine.engine import Engine as Engine
from deepinfer.engine.sampling_params import SamplingParams as SamplingParams
from deepinfer.measure.compare import compare as compare
from deepinfer.session import fmt as fmt
from deepinfer.session import notebook as notebook
from deepinfer.session import verdict as verdict
from deepinfer.slots import attention as attention
from deepinfer.slots import experts as experts
from deepinfer.slots import grammar as grammar
from deepinfer.slots import replay as replay
from deepinfer.slots import sampler as sampler
from deepinfer.slots import verifier as verifier
from deepinfer.tables.table import Table as Table

__version__: str
