"""What a scheduler did with each request in each step: run a few requests by hand, and a picture.

    requests, notes = watch(eng, [(0, prompt, 14), (2, another, 8)])
    draw(first_come=notes)                   # a line a request, a column a step

A note is one letter a step: P prompt rows, D a decode row, h holds pages but has no row, x is
preempted, . waits, and a space before the request arrives.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.engine import Engine
    from deepinfer.engine.request import Request

LOOKS = {  # note: colour, meaning
    "P": ("#E69F00", "prompt rows"),
    "D": ("#56B4E9", "a decode row"),
    "h": ("#A8A8A8", "holds pages, has no row"),
    "x": ("#D55E00", "is preempted"),
    ".": ("#E8E8E8", "waits"),
}


def watch(
    eng: "Engine", arrivals: Sequence[tuple[int, Sequence[int], int]]
) -> tuple[list["Request"], list[str]]:
    """Run requests to their end and note what each step did with each of them.

    arrivals: (step, prompt ids, max_tokens) of each request, which is added before that step of this
    run. All are greedy and ignore the end-of-sequence token. Returns the requests, whose output
    stays, and one string of notes for each.
    """
    requests: dict[int, Request] = {}
    notes = [" " * step for step, _, _ in arrivals]
    step = 0
    while len(requests) < len(arrivals) or eng.unfinished:
        for i, (when, prompt, tokens) in enumerate(arrivals):
            if when == step:
                id = eng.add(list(prompt), max_tokens=tokens, temperature=0.0, ignore_eos=True)
                requests[i] = eng.requests[id]
        left = {i: r for i, r in requests.items() if not r.finished}
        before = {i: (r.preemptions, r.num_computed, r.decoding) for i, r in left.items()}
        eng.step()
        for i, state in before.items():
            notes[i] += _note(requests[i], *state)
        step += 1
    return [requests[i] for i in range(len(arrivals))], notes


def _note(request: "Request", preemptions: int, computed: int, decoding: bool) -> str:
    """One letter for what a step did with a request; the counters are those before the step."""
    if request.preemptions > preemptions:
        return "x"
    if request.finished or request.num_computed > computed:
        return "D" if decoding else "P"
    return "." if request.status == "waiting" else "h"


def longest_pause(notes: Sequence[str]) -> int:
    """Most steps in a row, after its last prompt row, in which a request got no decode row."""
    behind = [line[line.rindex("P") + 1 :] for line in notes]
    return max(len(pause) for line in behind for pause in line.split("D"))


def draw(**runs: Sequence[str]) -> Any:
    """A figure of the notes of one or more runs, one panel for each; `_` in a title is a space."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    heights = [len(notes) + 1 for notes in runs.values()]
    fig, panels = plt.subplots(
        len(runs),
        figsize=(9, 0.8 + 0.24 * sum(heights)),
        layout="constrained",
        squeeze=False,
        sharex=True,
        height_ratios=heights,
    )
    for ax, (title, notes) in zip(panels[:, 0], runs.items()):
        for y, line in enumerate(notes):
            cells = [(x, LOOKS[note][0]) for x, note in enumerate(line) if note != " "]
            at, colours = zip(*cells)
            ax.bar(at, 0.84, 0.94, y - 0.42, color=colours, align="edge")
        ax.set(title=title.replace("_", " "), yticks=range(len(notes)))
        ax.set_ylim(len(notes) - 0.5, -0.5)
        ax.set_yticklabels(f"request {i}" for i in range(len(notes)))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
    panels[-1, 0].set_xlabel("step")
    seen = [k for k in LOOKS if any(k in line for notes in runs.values() for line in notes)]
    patches = [plt.Rectangle((0, 0), 1, 1, color=LOOKS[k][0]) for k in seen]
    meanings = [LOOKS[k][1] for k in seen]
    fig.legend(patches, meanings, loc="outside right center", frameon=False)
    plt.show()
