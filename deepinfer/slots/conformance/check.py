"""check: run a slot's laws on an object."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from deepinfer.slots.conformance.law import Broken, Law, Subject
from deepinfer.slots.conformance.report import FAILED, NOT_RUN, OK, Report, Result
from deepinfer.slots.registry import PROTOCOLS, promises, registry, slot_of
from deepinfer.slots.signatures import mismatches

if TYPE_CHECKING:
    from deepinfer.config import ModelConfig

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
    slot that is meant, where the object's methods leave it open. options: for a grammar, `spec` to
    compile and `vocab`, the tokens as a list of bytes.

    The object itself is never used: each law starts a copy. A law for exact objects is run only on
    one that claims exact=True. Returns a Report that is truthy iff every law that was run holds.
    """
    if isinstance(obj, str):
        if slot is None:
            raise ValueError(f"check({obj!r}): pass slot= with a name, for example slot='verifier'")
        obj = registry(slot).get(obj)
    slot = slot_of(obj) if slot is None else registry(slot).slot
    if isinstance(obj, type):
        obj = registry(slot)._make(obj)
    wrong = mismatches(obj, PROTOCOLS[slot])
    laws = importlib.import_module(f"deepinfer.slots.conformance.{slot}").LAWS
    laws = [x for x in laws if only is None or only in x.words]
    if wrong:
        results = [Result(FITS, FAILED, "; ".join(wrong))]
        results += [Result(x.words, NOT_RUN) for x in laws]
    else:
        subject = _subject(obj, slot, config, options)
        results = [Result(FITS, OK), *(_run(x, subject) for x in laws)]
    return Report(_name(obj), slot, tuple(results))


def _run(law: Law, subject: Subject) -> Result:
    if law.exact and not subject.promises.exact:
        return Result(law.words, NOT_RUN, "the object does not claim exact=True")
    try:
        reason = law.run(subject)
    except Broken as e:
        return Result(law.words, FAILED, str(e))
    except Exception as e:
        return Result(law.words, FAILED, f"raised {type(e).__name__}: {e}")
    return Result(law.words, NOT_RUN, reason) if reason else Result(law.words, OK)


def _subject(obj: Any, slot: str, config: ModelConfig | None, options: dict[str, Any]) -> Subject:
    from deepinfer.slots.conformance.small import DRAFTS, engine_info, small_config

    told = small_config() if config is None or slot in ("attention", "sampler") else config
    if slot == "verifier" and config is None:  # a drafter that proposes as many as are asked for
        told = dataclasses.replace(told, dspark_block_size=max(DRAFTS, obj.max_draft))
    return Subject(obj, promises(obj, slot), engine_info(told), options)


def _name(obj: Any) -> str:
    text = repr(obj)
    return text if len(text) <= 60 and " at 0x" not in text else type(obj).__name__
