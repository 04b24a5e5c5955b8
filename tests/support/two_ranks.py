"""Run a function on two gloo ranks of this machine and collect what each returns."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.launching import PRELOADED


def run(function, *arguments):
    """[function(rank, *arguments) of rank 0, of rank 1]; the function must be importable.

    The ranks are forked from a process that has imported what takes seconds, and nothing else has happened in.
    """
    mp.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        shared = (folder, dict(os.environ), function, arguments)
        mp.start_processes(_rank, args=shared, nprocs=2, start_method="forkserver")
        return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(2)]


def _rank(rank, folder, environment, function, arguments):
    os.environ.clear()
    os.environ.update(environment)  # of now, not of when the first ranks were started
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        torch.save(function(rank, *arguments), os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
