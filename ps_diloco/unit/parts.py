"""The background half of a unit, as ``join`` puts it together."""

from __future__ import annotations

from dataclasses import dataclass, field

from ps_diloco.run import OpenRun
from ps_diloco.store.counting import CountingStore
from ps_diloco.threads import Event
from ps_diloco.unit.engine import Engine
from ps_diloco.unit.heart import Heart
from ps_diloco.unit.link import Link
from ps_diloco.unit.outbox import Identity, Outbox
from ps_diloco.unit.puller import Puller
from ps_diloco.unit.saver import Saver


@dataclass(kw_only=True)
class Parts:
    """``errors`` holds what the background threads ended of; the training thread raises the first."""

    run: OpenRun
    store: CountingStore
    owns_store: bool
    identity: Identity
    engine: Engine
    outbox: Outbox
    puller: Puller
    saver: Saver
    heart: Heart
    link: Link
    stop: Event
    errors: list[BaseException] = field(default_factory=list)
