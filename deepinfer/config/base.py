"""What both kinds of config share: checks when an object is made, `replace` and `diff`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from deepinfer.config import checks


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the config dataclasses share: type checks when made, `replace`, `diff`."""

    _section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        checks.check_types(self, self._section)
        checks.RULES[type(self).__name__](self)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def diff(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """{field: (value here, value there)} of every field that differs.

        Raises TypeError when `other` is another kind of config.
        """
        if type(other) is not type(self):
            raise TypeError(
                f"diff of a {type(self).__name__} with a {type(other).__name__}: "
                f"pass another {type(self).__name__}"
            )
        fields = [f.name for f in dataclasses.fields(self) if f.compare]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in fields}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
