"""Names: units, attempts, contributions (format §3, §4, §5.7)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ps_diloco.errors import ConfigError, FormatError

UNIT_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
ATTEMPT_ID = re.compile(r"[0-9a-f]{16}")


def check_unit_name(name: str, *, what: str = "unit") -> str:
    """Return ``name``, or raise :class:`ConfigError` if it is no unit or region name."""
    if not UNIT_NAME.fullmatch(name):
        raise ConfigError(
            f"a {what} name has 1 to 63 lower-case letters, digits or hyphens and starts with a letter or digit",
            **{what: repr(name)},
            remedy="choose another name, for example us-east-1a",
        )
    return name


@dataclass(frozen=True, order=True, slots=True)
class ContributionId:
    """Name of a contribution. The order of the fields is the merge order within a timeline (format §6.2)."""

    timeline: int
    unit: str
    incarnation: int
    seq: int

    def __str__(self) -> str:
        return f"t{self.timeline:06d}/{self.unit}/{self.incarnation:06d}/{self.seq:020d}"

    @staticmethod
    def parse(text: str) -> ContributionId:
        match = re.fullmatch(r"t(\d{6})/([a-z0-9][a-z0-9-]{0,62})/(\d{6})/(\d{20})", text, re.ASCII)
        if match is None:
            raise FormatError("not the name of a contribution", text=repr(text[:120]))
        return ContributionId(int(match[1]), match[2], int(match[3]), int(match[4]))
