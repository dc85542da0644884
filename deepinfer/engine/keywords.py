"""Keywords spelt out in a method's runtime signature, so that help() and a notebook's completion show
them as a type checker does: `temperature: float = 1.0`, in lines that fit a screen."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

NEAR = 0.7  # how alike two names are before one is suggested for the other (difflib's ratio)
WIDTH = 90  # characters of a line of help(), behind the method's name


class Word(str):
    """Text that a signature shows without quotation marks: a type as it is written."""

    __repr__ = str.__str__


class Wrapped(inspect.Signature):
    """A signature that is shown in lines."""

    def __str__(self) -> str:
        whole = super().__str__()
        if len(whole) <= WIDTH:
            return whole
        lines = [""]
        for part in self._parts():
            if lines[-1] and len(lines[-1]) + len(part) > WIDTH - 4:
                lines.append("")
            lines[-1] += f" {part}," if lines[-1] else f"{part},"
        end = "" if self.return_annotation is self.empty else f" -> {self.return_annotation}"
        return "(\n    " + "\n    ".join(lines).removesuffix(",") + f"\n){end}"

    def _parts(self) -> Iterator[str]:
        starred = False
        for p in self.parameters.values():
            if p.kind is p.KEYWORD_ONLY and not starred:
                yield "*"
            starred |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
            yield str(p)


def completes(*keywords: type, defaults: Mapping[str, object]):
    """Decorator: the fields of TypedDicts in place of a method's **keywords. defaults: what each is
    where it is not given."""

    def put(method):
        signature = inspect.signature(method)
        known = [worded(p) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = {k: t for d in keywords for k, t in d.__annotations__.items()}
        spelt = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=word(kind)
            )
            for name, kind in fields.items()
            if name not in signature.parameters
        ]
        returned = word(signature.return_annotation)
        method.__signature__ = Wrapped([*known, *spelt], return_annotation=returned)
        return method

    return put


def worded(p: inspect.Parameter) -> inspect.Parameter:
    return p.replace(annotation=word(p.annotation))


def word(kind: object) -> object:
    """An annotation that was left as text, as the word it is."""
    text = getattr(kind, "__forward_arg__", kind)
    return Word(text) if isinstance(text, str) else kind


class Kept(dict[str, object]):
    """Defaults of keywords that change something: what is not given stays."""

    def __missing__(self, name: str) -> object:
        return Word("unchanged")
