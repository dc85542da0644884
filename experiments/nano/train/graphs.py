"""A step of work as one CUDA graph.

A training step is some five thousand small kernels, a decoding step some five hundred; launching
them takes longer than running them. A graph launches all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EAGER = 5  # calls before the capture: kernels are compiled and memory is laid out in them


class Captured:
    """`run()` of fixed input tensors, eager at first, then replayed as a graph.

    inputs: the tensors that run reads; a call copies its arguments into them, so that eager and
    captured calls are the same code. run must not wait for the device and returns {name: tensor}.
    Random numbers must come from torch's default generator. capture: False = always eager.
    """

    def __init__(
        self, run: Callable[[], dict[str, Tensor]], inputs: dict[str, Tensor], capture: bool
    ) -> None:
        self.run, self.inputs, self.capture = run, inputs, capture
        self.calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: dict[str, Tensor] = {}

    def __call__(self, **values: Tensor | float) -> dict[str, Tensor]:
        """Run with the named inputs changed. The results are overwritten by the next call."""
        for name, value in values.items():
            held = self.inputs[name]
            if isinstance(value, Tensor):
                held.copy_(value, non_blocking=True)
            else:
                held.fill_(value)
        self.calls += 1
        if not self.capture:
            return self.run()
        if self.calls <= EAGER:
            return self._on_a_side_stream()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self.run()
        self._graph.replay()
        return self._out

    def _on_a_side_stream(self) -> dict[str, Tensor]:
        """As the capture will run, so that memory is laid out alike."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = self.run()
        torch.cuda.current_stream().wait_stream(side)
        return out
