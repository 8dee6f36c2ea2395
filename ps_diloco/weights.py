"""The weights of a version as a plain state dict."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ps_diloco.checkpoint import read_fragment
from ps_diloco.layout import ROLE_ARRAY
from ps_diloco.records import Manifest
from ps_diloco.run import OpenRun

_ARRAYS = {"elements": "params", "floats": "floats", "ints": "ints", "frozen": "frozen"}


def read_weights(
    run: OpenRun, manifest: Manifest, *, float32: bool = False, on_fragment: Callable[[], None] = lambda: None
) -> dict[str, torch.Tensor]:
    """name -> tensor for everything in the layout, in the model's own dtypes, aliases of tied parameters included: fits ``load_state_dict``.

    With ``float32``, what is bfloat16 or float16 in the model stays as the run keeps it. Does I/O, one fragment at a time;
    ``on_fragment`` is called after each. Raises :class:`NotFound` if the version's objects are gone.
    """
    found: dict[str, torch.Tensor] = {}
    for fragment, entry in enumerate(manifest.fragments):
        value = read_fragment(run, entry, fragment)
        for place in run.layout.entries:
            if place.fragment == fragment:
                dtype = torch.float32 if float32 and place.role != "int_buffer" else getattr(torch, place.dtype)
                flat = getattr(value, _ARRAYS[ROLE_ARRAY[place.role]])[place.offset : place.offset + place.size]
                for name in (place.name, *place.aliases):
                    found[name] = flat.view(place.shape).to(dtype, copy=True)
        on_fragment()
    return {name: found[name] for place in run.layout.entries for name in (place.name, *place.aliases)}
