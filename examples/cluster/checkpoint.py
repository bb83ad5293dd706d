"""Checkpoints that are whole or not there, in a folder that all workers see.

Each worker writes its part into ``step-00000020.part`` (`torch.distributed.checkpoint`, so another
number of workers can read it). Then the first worker writes ``whole.json``, with the size of every
file, and renames the folder to ``step-00000020``. A worker that is killed leaves a ``.part``, or
files that are shorter than ``whole.json`` says: neither is taken for a checkpoint."""

import json
import os
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

WHOLE = "whole.json"


def save(folder, step, state, about, keep=2):
    """``state``: a state dict, DTensors included. ``about``: what `newest` gives back. All workers
    call it."""
    path = Path(folder) / f"step-{step:08}"
    part = path.with_suffix(".part")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(part, ignore_errors=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=part)  # returns when the files of all workers are on the disk
    if first:
        sizes = {file.name: file.stat().st_size for file in part.iterdir()}
        with open(part / WHOLE, "w") as file:
            json.dump(dict(about, sizes=sizes), file)
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        shutil.rmtree(path, ignore_errors=True)  # one that was not whole
        part.rename(path)
        _sync(path.parent)
        for _, old, _ in list(_all(folder))[keep:]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def newest(folder):
    """-> (step, path, about) of the newest whole one, or None. All workers call it and get the
    same."""
    found = [next(_all(folder), None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device="cpu")
    return found[0]


def load(path, state):
    """Fills ``state``, which has the tensors that are wanted, in place."""
    dcp.load(state, checkpoint_id=path)


def _all(folder):
    """The whole ones, newest first."""
    for path in sorted(Path(folder).glob("step-????????"), reverse=True):
        try:
            about = json.loads((path / WHOLE).read_text())
            if all(
                (path / name).stat().st_size == size for name, size in about.pop("sizes").items()
            ):
                yield int(path.name[5:]), path, about
        except (OSError, ValueError, KeyError):
            continue


def _sync(folder):
    """That the names in it are on the disk, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
