"""Open a run's weights with Zarr alone: no ps_diloco, no torch.

python examples/open_weights.py /srv/runs/first                # a directory
python examples/open_weights.py s3://bucket/runs/first         # needs s3fs; gs:// needs gcsfs

An anchor is a Zarr v3 group with everything of one fragment at one version; its attribute ``entries`` says which tensor lies where. Anchors are written every
``pull.anchor_every`` steps, so these weights are a little older than the newest version, of which ``ps-diloco export`` makes a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import zarr

ARRAYS = {"parameter": "params", "float_buffer": "floats", "int_buffer": "ints", "frozen": "frozen"}


def read_json(url: str) -> Any:
    with fsspec.open(url) as file:
        return json.load(file)


def tensors(root: str) -> Iterator[tuple[str, np.ndarray]]:
    head = read_json(f"{root}/head.json")
    manifest = read_json(f"{root}/manifests/{head['timeline']:06}/{head['version']:020}.json")
    for fragment in manifest["fragments"]:
        anchor = "/".join(fragment["anchor"]["objects"][0]["key"].split("/")[:4])
        group: Any = zarr.open_group(f"{root}/{anchor}", mode="r")
        for entry in group.attrs["entries"]:
            size = int(np.prod(entry["shape"]))
            if size:
                flat = group[ARRAYS[entry["role"]]][entry["offset"] : entry["offset"] + size]
                yield entry["name"], flat.reshape(entry["shape"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="a path, or a URL that fsspec knows")
    for name, values in tensors(parser.parse_args().run.rstrip("/")):
        print(f"{name:40} {values.dtype!s:8} {values.shape!s:16} norm {np.linalg.norm(values.astype(np.float64)):.6g}")


if __name__ == "__main__":
    main()
