"""ps_diloco: Decoupled DiLoCo over an object-storage bucket.

::

    unit = ps_diloco.join(run_url, model, optimizer, unit="us-east-1a")
    while not unit.done:
        ...one inner step...
        unit.step(tokens=n)

Reading order: ``docs/bucket-format.md``, ``records``, ``log``, ``aggregator/outer_step``, ``unit/unit``, ``unit/state``.
"""

__version__ = "0.1.0.dev0"

from ps_diloco.config import CreateSettings, RunSettings
from ps_diloco.errors import PsDilocoError
from ps_diloco.run import OpenRun, create, create_run, open_run
from ps_diloco.store import open_store
from ps_diloco.unit.join import join
from ps_diloco.unit.unit import Unit

__all__ = ["CreateSettings", "OpenRun", "PsDilocoError", "RunSettings", "Unit", "create", "create_run", "join", "open_run", "open_store"]
