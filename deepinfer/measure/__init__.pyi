"""The public names of `di.measure`, for editors and type checkers. The run-time list is `_WHERE`."""

from deepinfer.measure.distributions import dist_error as dist_error
from deepinfer.measure.replay.cost import prefill_cost as prefill_cost
from deepinfer.measure.replay.divergence import replay_divergence as replay_divergence
from deepinfer.measure.replay.error import logits_error as logits_error
from deepinfer.measure.replay.error import replay_error as replay_error
from deepinfer.measure.replay.report import ReplayReport as ReplayReport
from deepinfer.measure.replay.seconds import replay_seconds as replay_seconds
from deepinfer.tables.table import Table as Table
