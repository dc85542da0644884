"""check: run a slot's laws on an object."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import TYPE_CHECKING, Any

from deepinfer.conformance.law import Broken, Law, Subject
from deepinfer.conformance.origin import origin
from deepinfer.conformance.report import FAILED, NOT_RUN, OK, Report, Result
from deepinfer.slots.registry import PROTOCOLS, promises, registry, slot_of
from deepinfer.slots.signatures import mismatches

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig

SCHEDULES = ("schedule", "preempt", "release")  # methods of a scheduler
FITS = "its methods fit the protocol"


def check(
    obj: Any,
    slot: str | None = None,
    *,
    only: str | None = None,
    config: ModelConfig | None = None,
    **options: Any,
) -> Report:
    """Run the laws of its slot on a slot object, on one thread in under five seconds.

    obj: an instance, a class that needs no arguments, or (with slot=) a registered name. slot: the
    slot that is meant, where the object's methods leave it open. only: run the laws whose sentence
    has these words, for example "later keys". config: the model of the laws' engine, in place of
    one small enough for them all; attention and sampler laws keep to the small one. options: for a
    grammar, `spec` to compile and `vocab`, the tokens as a list of bytes.

    The object itself is never used: each law starts a copy. A law for exact objects is run only on
    one that claims exact=True. Where one line of the object's code raises in several laws it is
    told once, and the other laws count as not run. Returns a Report that is truthy iff every law
    that was run holds. TypeError for a scheduler, which is no slot. Raises ValueError where `only`
    is in no law, with the laws.
    """
    if isinstance(obj, str):
        if slot is None:
            raise ValueError(f"check({obj!r}): pass slot= with a name, for example slot='verifier'")
        obj = registry(slot).get(obj)
    if slot is None and all(callable(getattr(obj, m, None)) for m in SCHEDULES):
        named = obj.__name__ if isinstance(obj, type) else type(obj).__name__
        raise TypeError(
            f"{named} is a scheduler, which is a setting and not a slot: di.check has laws for "
            f"{', '.join(PROTOCOLS)}; an engine checks it at scheduler={named}, and each step of it"
        )
    slot = slot_of(obj) if slot is None else registry(slot).slot
    if isinstance(obj, type):
        obj = registry(slot)._make(obj)
    wrong = mismatches(obj, PROTOCOLS[slot])
    laws = importlib.import_module(f"deepinfer.conformance.{slot}").LAWS
    laws = laws if only is None else _chosen(laws, only, slot)
    if wrong:
        results = [Result(FITS, FAILED, "; ".join(wrong))]
        results += [Result(x.words, NOT_RUN) for x in laws]
    else:
        subject = _subject(obj, slot, config, options)
        results = [Result(FITS, OK), *_run_all(laws, subject)]
    return Report(_name(obj), slot, tuple(results))


def _chosen(laws: list[Law], only: str, slot: str) -> list[Law]:
    """The laws with the words `only`; none where it names the first row, that the methods fit."""
    if not isinstance(only, str):
        raise TypeError(f"check(only={only!r}): want words of a law, a string")
    chosen = [x for x in laws if only in x.words]
    if chosen or only in FITS:
        return chosen
    told = {x.words: x.words.replace(",", "").replace(";", "").lower().split() for x in laws}
    wanted = only.lower().split()
    near = [w for w, v in told.items() if any(difflib.get_close_matches(o, v, 1) for o in wanted)]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    lines = "".join(f"\n  - {w}" for w in told)
    raise ValueError(f"check(only={only!r}): no law of {slot} has these words{hint}{lines}")


def _run_all(laws: list[Law], subject: Subject) -> list[Result]:
    """Each law's result; of several that one mistake breaks, the first."""
    seen: set[tuple[object, ...]] = set()
    results = []
    for x in laws:
        result, error = _run(x, subject)
        mistake = origin(error).mistake if error else None
        if mistake in seen:
            result = Result(x.words, NOT_RUN, "same error")
        elif mistake:
            seen.add(mistake)
        results.append(result)
    return results


def _run(law: Law, subject: Subject) -> tuple[Result, Exception | None]:
    """A law's result, and what the object raised where that broke it."""
    if law.exact and not subject.promises.exact:
        return Result(law.words, NOT_RUN, "the object does not claim exact=True"), None
    try:
        reason = law.run(subject)
    except Broken as e:
        return Result(law.words, FAILED, str(e)), e.error
    except Exception as e:
        return Result(law.words, FAILED, f"raised {origin(e).words}"), e
    return Result(law.words, NOT_RUN, reason) if reason else Result(law.words, OK), None


def _subject(obj: Any, slot: str, config: ModelConfig | None, options: dict[str, Any]) -> Subject:
    from deepinfer.conformance.small import DRAFTS, engine_info, small_config

    told = small_config() if config is None or slot in ("attention", "sampler") else config
    if slot == "verifier" and config is None:  # a drafter that proposes as many as are asked for
        told = dataclasses.replace(told, dspark_block_size=max(DRAFTS, obj.max_draft))
    return Subject(obj, promises(obj, slot), engine_info(told), options)


def _name(obj: Any) -> str:
    text = repr(obj)
    return text if len(text) <= 60 and " at 0x" not in text else type(obj).__name__
