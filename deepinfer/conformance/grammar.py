"""The laws of a grammar variant.

They walk at random through what a compiled grammar allows. `di.check(obj, spec=..., vocab=...)`
says which grammar (default: None, a grammar without constraint) and which tokens (a list of bytes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepinfer.conformance.law import Law, Subject, case, expect, generator, law

LAWS: list[Law] = []
WALKS, LONGEST = 6, 12
VOCAB = [bytes([c]) for c in range(32, 127)] + [
    b"ab",
    b'{"',
    b'"}',
    b"true",
    b"12",
    b"",
]  # b"": the end


def vocab(s: Subject) -> Any:
    return s.options.get("vocab", VOCAB)


def begin(s: Subject) -> Any:
    """The state of a new request."""
    return s.fresh().compile(s.options.get("spec"), vocab(s)).start()


def legal(state: Any, size: int) -> list[int]:
    """Legal ids in order. `allowed` may give ids, a mask [v] of bools, or None for every token."""
    allowed = state.allowed()
    if allowed is None:
        return list(range(size))
    if allowed.dtype == torch.bool:
        expect(
            allowed.shape == (size,),
            f"the mask has shape {tuple(allowed.shape)}, it should be ({size},)",
        )
        return allowed.nonzero()[:, 0].tolist()
    ids = sorted(set(allowed.tolist()))
    expect(
        not ids or (0 <= ids[0] and ids[-1] < size),
        f"allowed ids {ids[:3]}.. are not all in 0..{size - 1}",
    )
    return ids


def walks(s: Subject) -> Iterator[tuple[Any, list[int]]]:
    """(state, tokens so far) along random legal paths, shortest first."""
    size = len(vocab(s))
    paths: list[list[int]] = [[]]
    for i in range(WALKS):
        g, state, path = generator(i), begin(s), []
        while len(path) < LONGEST and not state.done:
            ids = legal(state, size)
            if not ids:
                break
            path.append(ids[int(torch.randint(len(ids), (1,), generator=g))])
            with case(tokens=path):
                expect(state.accept(path[-1]), f"allowed lists token {path[-1]}, accept refuses it")
            paths.append(list(path))
    for path in sorted(paths, key=len):
        yield _at(s, path), path


def _at(s: Subject, path: list[int]) -> Any:
    state = begin(s)
    for token in path:
        state.accept(token)
    return state


@law(LAWS, "a token is listed by allowed if and only if accept takes it")
def mask_is_accept(s: Subject) -> None:
    size = len(vocab(s))
    for state, path in walks(s):
        with case(after=path):
            listed = set(legal(state, size))
            for token in range(size):
                taken = state.fork().accept(token)
                expect(
                    isinstance(taken, bool),
                    f"accept gives a {type(taken).__name__}, it should give a bool",
                )
                expect(
                    taken == (token in listed),
                    f"token {token} is {'' if token in listed else 'not '}allowed, "
                    f"accept says {taken}",
                )


@law(LAWS, "a refused token leaves the state as it was")
def refusal(s: Subject) -> None:
    size = len(vocab(s))
    for state, path in walks(s):
        before = (legal(state, size), state.done)
        for token in [t for t in range(size) if t not in set(before[0])][:5]:
            with case(after=path, refused=token):
                state.accept(token)
                expect(
                    (legal(state, size), state.done) == before,
                    "the refused token changed what is allowed",
                )


@law(LAWS, "rollback(n) undoes the last n tokens")
def rollback(s: Subject) -> None:
    size = len(vocab(s))
    for _, path in walks(s):
        for n in range(len(path) + 1):
            with case(after=path, rollback=n):
                state, earlier = _at(s, path), _at(s, path[: len(path) - n])
                state.rollback(n)
                expect(
                    legal(state, size) == legal(earlier, size),
                    "what is allowed is not what was allowed before them",
                )
                expect(state.done == earlier.done, f"done is {state.done}, it was {earlier.done}")


@law(LAWS, "a fork is the same state, and neither changes the other")
def fork(s: Subject) -> None:
    size = len(vocab(s))
    for state, path in walks(s):
        with case(after=path):
            before, other = (legal(state, size), state.done), state.fork()
            expect((legal(other, size), other.done) == before, "the fork allows something else")
            if before[0]:
                other.accept(before[0][-1])
                expect(
                    (legal(state, size), state.done) == before,
                    "a token given to the fork changed the original",
                )
                once, twice = state.fork(), state.fork()
                once.accept(before[0][0])
                expect(
                    (legal(twice, size), twice.done) == before,
                    "a token given to one fork changed another",
                )


@law(LAWS, "a state that is not done allows a token")
def never_stuck(s: Subject) -> None:
    for state, path in walks(s):
        with case(after=path):
            expect(isinstance(state.done, bool), f"done is a {type(state.done).__name__}")
            expect(
                state.done or legal(state, len(vocab(s))), "nothing is allowed, and done is False"
            )


@law(LAWS, "two requests of one compiled grammar do not share a state")
def separate(s: Subject) -> None:
    size = len(vocab(s))
    compiled = s.fresh().compile(s.options.get("spec"), vocab(s))
    for _, path in walks(s):
        with case(first_request=path):
            before = legal(compiled.start(), size)
            first = compiled.start()
            for token in path:
                first.accept(token)
            expect(
                legal(compiled.start(), size) == before,
                "a new request does not begin at the beginning",
            )
