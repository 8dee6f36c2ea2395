"""Every error of ps_diloco, sorted by what the caller does next.

::

    PsDilocoError
    |- UserError            fix the input named in the message and run again
    |  |- ConfigError       a setting, a TOML file, an option
    |  |- UrlError          a run URL that cannot mean a store
    |  |- LayoutError       the model is not the run's model
    |  |- RunExists / RunNotFound
    |  |- UnitActive        another process runs under this unit's name
    |  '- UnsupportedStore  the store does not keep a promise that safety needs
    |- StoreError           the store said no, or nothing
    |  |- NotFound
    |  |- AlreadyExists     a create met an existing object
    |  |- Denied            credentials or permissions
    |  '- Unavailable       try again later; ``maybe_applied`` if a write may have landed
    |- FormatError          bytes in the bucket break the format; never retried blindly
    |  |- UnknownFormat     written by a newer (or no) ps_diloco
    |  |- IntegrityError    size, hash or checksum differ
    |  |- LimitExceeded     larger than the format allows; refused before allocation
    |  '- NonFinite         NaN or infinity where numbers are due
    |- Fenced               a newer incarnation of this unit runs; end, never retry
    '- InvariantViolation   our own bug: report it

Messages are lower case, state the rule that was broken, then ``key=value`` facts, then the remedy. ``kind`` is stable and may be
matched by scripts; ``exit_code`` is what the command line returns.
"""

from __future__ import annotations

from typing import ClassVar


class PsDilocoError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is one readable paragraph."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 70

    def __init__(self, rule: str, /, *, remedy: str = "", **facts: object) -> None:
        self.rule = rule
        self.remedy = remedy
        self.facts = facts
        text = rule
        if facts:
            text += ": " + " ".join(f"{name}={value}" for name, value in facts.items())
        if remedy:
            text += f"; {remedy}"
        super().__init__(text)


class UserError(PsDilocoError, ValueError):
    kind = "user"
    exit_code = 2


class ConfigError(UserError):
    kind = "config"


class UrlError(UserError):
    kind = "url"


class LayoutError(UserError):
    kind = "layout"


class RunExists(UserError):
    kind = "run-exists"


class RunNotFound(UserError):
    kind = "run-not-found"


class UnitActive(UserError):
    kind = "unit-active"


class UnsupportedStore(UserError):
    kind = "unsupported-store"


class StoreError(PsDilocoError):
    kind = "store"
    exit_code = 3


class NotFound(StoreError):
    kind = "not-found"


class AlreadyExists(StoreError):
    kind = "already-exists"


class Denied(StoreError):
    kind = "denied"


class Unavailable(StoreError):
    """The store gave no definite answer. ``maybe_applied`` is true for a write that may have landed."""

    kind = "unavailable"

    def __init__(self, rule: str, /, *, maybe_applied: bool = False, remedy: str = "", **facts: object) -> None:
        super().__init__(rule, remedy=remedy, **facts)
        self.maybe_applied = maybe_applied


class FormatError(PsDilocoError):
    kind = "format"
    exit_code = 5


class UnknownFormat(FormatError):
    kind = "unknown-format"


class IntegrityError(FormatError):
    kind = "integrity"


class LimitExceeded(FormatError):
    kind = "limit"


class NonFinite(FormatError):
    kind = "non-finite"


class Fenced(PsDilocoError):
    kind = "fenced"
    exit_code = 4


class InvariantViolation(PsDilocoError):
    kind = "invariant"
    exit_code = 70
