"""What `deepinfer demo` runs: the nano model completes a file that it was never trained on.

One prompt, twice in a batch: at temperature 0 and sampled. Once without drafts, once with as many
as the model makes: the texts are the same, the steps are fewer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.completion import Completion
    from deepinfer.engine.engine import Engine

FILE, UP_TO = "linecache.py", "def getline(filename, lineno, module_globals=None):"
TEMPERATURE = 0.6  # of the sampled text; much above, a model this small loses its thread
SHOWN_LINES = 6  # of the prompt


@dataclass(frozen=True)
class Demo:
    """prompt: what was completed; plain, drafted: its completions at temperature 0 and sampled,
    without and with drafts; seconds: load, plain, drafted."""

    prompt: str
    plain: Sequence[Completion]
    drafted: Sequence[Completion]
    drafts: int
    seed: int
    parameters: int
    nbytes: int
    dtype: str
    seconds: dict[str, float]

    @property
    def same(self) -> bool:
        """Whether drafts left every token as it was."""
        return [c.token_ids for c in self.plain] == [c.token_ids for c in self.drafted]

    @property
    def tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.drafted)

    def facts(self) -> dict[str, Any]:
        """Plain values, for JSON; lists have the greedy text first."""
        return {
            "file": FILE,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "tokens": self.tokens,
            "steps": [_steps(c) for c in self.plain],
            "drafted_steps": [_steps(c) for c in self.drafted],
            "tokens_per_step": [tokens_per_step(c) for c in self.drafted],
            "same": self.same,
            "seconds": self.seconds,
        }


def run(device: str = "auto", max_tokens: int = 48, seed: int = 0) -> Demo:
    """Load nano and complete the prompt. Errors as of `Engine.nano` and `generate`."""
    import deepinfer as di
    from deepinfer.checkpoint import nano

    begun = prompt()
    params = [
        di.SamplingParams(temperature=t, seed=seed, max_tokens=max_tokens) for t in (0, TEMPERATURE)
    ]
    engine, load = _timed(lambda: di.Engine.nano(device=device))
    drafts = engine.config.max_draft
    out, seconds = [], {"load": load}
    with engine, engine.with_(verifier=di.verifier.Fixed(drafts)) as drafting:
        for name, each in (("plain", engine), ("drafted", drafting)):
            each.generate(begun, max_tokens=2, seed=0)  # what the first call sets up is not timed
            done, seconds[name] = _timed(lambda each=each: each.generate([begun] * 2, params))
            out.append(done.raise_for_errors())
        return Demo(
            begun,
            *out,
            drafts,
            seed,
            _parameters(engine),
            sum((nano.folder() / name).stat().st_size for name in nano.FILES),
            str(engine.model.dtype).removeprefix("torch."),
            seconds,
        )


def prompt() -> str:
    """The beginning of a held-out file, up to a function's first line."""
    from deepinfer import data

    whole = next(text for text in data.heldout(None) if text.path == FILE)
    return whole[: whole.index(UP_TO) + len(UP_TO)]


def said(demo: Demo, threads: int) -> str:
    """The demo as text."""
    from deepinfer.display.numbers import counted, fmt
    from deepinfer.display.text import grid

    greedy, sampled = demo.drafted
    seconds, steps = demo.seconds, [_steps(c) for c in demo.plain]
    rates = " and ".join(fmt(tokens_per_step(c)) for c in demo.drafted if _steps(c) > 1)
    same = "the same tokens" if demo.same else f"other tokens (a near-tie in {demo.dtype})"
    lines = demo.prompt.splitlines()[-SHOWN_LINES:]
    return "\n".join(
        [
            "nano: DeepSeek-V4.1 in small, trained on Python's standard library.",
            f"{demo.parameters / 1e6:.1f} M parameters, {demo.nbytes / 1e6:.1f} MB in FP8 and FP4, "
            f"loaded in {seconds['load']:.2f} s.",
            "",
            f"The end of its prompt, from {FILE}, which it has never seen:",
            *_marked(lines, "  | "),
            "",
            "It goes on, at temperature 0:",
            *_marked(greedy.text.strip("\n").splitlines(), "  > "),
            "",
            f"And at temperature {TEMPERATURE}, with seed {demo.seed}:",
            *_marked(sampled.text.strip("\n").splitlines(), "  > "),
            "",
            f"The first of them by steps: the prompt's, then those that verify {demo.drafts} "
            "drafts",
            grid(("step", "tokens", "text"), _by_step(greedy), ("step", "tokens")),
            "",
            *([f"{rates} tokens per step after the prompt's"] if rates else []),
            f"Without drafts: {counted(max(steps), 'step')}, and {same}",
            f"Both texts in one batch: {counted(demo.tokens, 'token')} in {seconds['drafted']:.2f} "
            "s "
            f"({demo.tokens / seconds['drafted']:.0f} tokens/s), without drafts in "
            f"{seconds['plain']:.2f} s; {counted(threads, 'thread')}",
        ]
    )


def tokens_per_step(completion: Completion) -> float | None:
    """Of the steps after the one that read the prompt, which always gives one token."""
    steps = _steps(completion) - 1
    return (len(completion.token_ids) - 1) / steps if steps else None


def _steps(completion: Completion) -> int:
    return len({token.step for token in completion.steps})


def _by_step(completion: Completion) -> list[list[str]]:
    """(step, how many tokens, their text) as text, for each step."""
    pieces: dict[int, list[str]] = {}
    for token, piece in zip(completion.steps, completion.pieces, strict=True):
        pieces.setdefault(token.step, []).append(piece)
    each = enumerate(pieces.values())
    return [[str(n), str(len(step)), repr("".join(step))] for n, step in each]


def _marked(lines: Sequence[str], mark: str) -> list[str]:
    return [f"{mark}{line}".rstrip() for line in lines]


def _parameters(engine: Engine) -> int:
    return sum(p.numel() for p in engine.model.parameters())


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start
