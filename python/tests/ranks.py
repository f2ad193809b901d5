# SPDX-License-Identifier: Apache-2.0
"""Processes of a gloo group that run functions of test modules."""

import datetime
import functools
import multiprocessing
import os
import tempfile
import traceback


def _serve(rank, world, path, seconds, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["FA2_NUM_THREADS"] = "1"
    # The group's timeout counts from here: when all ranks have what they import.
    pipe.send("ready")
    pipe.recv()
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=seconds)
    )
    while True:
        job = pipe.recv()
        if job is None:
            break
        function, arguments = job
        try:
            pipe.send((True, function(rank, world, *arguments)))
        except Exception as error:
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    os._exit(0)


@functools.cache
def _context():
    """Processes that begin as copies of one that has imported PyTorch and fa2: ten imports at once take minutes on a
    machine that is busy."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "pytest", "torch", "torch.distributed", "fa2_cpu.distributed"])
    return context


class Ranks:
    """So many processes, started once; a group whose calls fail after `seconds`."""

    def __init__(self, world, seconds=300):
        context = _context()
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, "store")
        self._pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, path, seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        for pipe in self._pipes:
            if not pipe.poll(400):
                raise TimeoutError("a rank does not start")
            pipe.recv()
        for pipe in self._pipes:
            pipe.send("go")

    def attempt(self, function, *arguments, limit=400):
        """(True, result) or (False, (type's name, sentence, traceback)) of function(rank, world, …) on each rank;
        None for a rank that ended."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = []
        for pipe in self._pipes:
            if not pipe.poll(limit):
                raise TimeoutError(f"{function.__name__} hangs")
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(None)
        return results

    def run(self, function, *arguments, limit=400):
        """The results of all ranks; raises where one fails."""
        results = self.attempt(function, *arguments, limit=limit)
        for rank, (ok, result) in enumerate(results):
            assert ok, f"rank {rank}: {result[2]}"
        return [result for _, result in results]

    def refusals(self, function, *arguments):
        """Type's name and sentence on each rank, all of which must raise."""
        results = self.attempt(function, *arguments)
        for rank, (ok, result) in enumerate(results):
            assert not ok, f"rank {rank} returned {result}"
        return [result[:2] for _, result in results]

    def close(self):
        for pipe, process in zip(self._pipes, self.processes):
            try:
                pipe.send(None)
            except OSError:
                pass
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
