"""Count the collectives that a process calls, also as rank 0 of many ranks that are not there."""

import collections

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "barrier")


class Tally(TorchDispatchMode):
    """While it is entered, it counts collectives, whether Python, DDP's reducer or FSDP calls them:
    {(kind, size of the group, nodes that it spans): [calls, bytes]}. Bytes are those of the whole
    tensor: what an all-gather makes, or what a reduce-scatter takes.
    """

    def __init__(self, per_node):
        super().__init__()
        self.per_node = per_node  # rank r is on node r // per_node
        self.found = collections.defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        group = group_of(function, args)
        if not group:
            return found
        name = function.name().split("::")[1].strip("_")
        name = name.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
        kind = next((kind for kind in KINDS if name.startswith(kind)), name)
        ranks = dist.get_process_group_ranks(group)
        entry = self.found[kind, len(ranks), len({rank // self.per_node for rank in ranks})]
        entry[0] += 1
        if kind != "barrier":
            entry[1] += max(map(bytes_of, [*args, found]))
        if function.name() == "c10d::allreduce_" and dist.get_backend(group) == "fake":
            return args[0], finished(args[0])
        return found

    def rows(self):
        """The collectives as a list of dicts, as in dry_run.json."""
        return [
            {"kind": kind, "group_size": size, "nodes": nodes, "calls": calls, "bytes": volume}
            for (kind, size, nodes), (calls, volume) in sorted(self.found.items())
        ]


def group_of(function, args):
    """The process group of a collective, or None if the function is something else."""
    if function.namespace == "c10d":
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        return dist.ProcessGroup.unbox(groups[0]) if groups else None
    if function.namespace == "_c10d_functional":
        names = [arg for arg in args if isinstance(arg, str)]
        return distributed_c10d._resolve_process_group(names[-1]) if names else None
    return None


def bytes_of(part):
    """The bytes of all tensors in an argument or a result."""
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor))


def finished(tensors):
    """A finished collective that knows its result, which DDP's reducer reads. torch's fake group
    does not tell it, or only with an option that torch 2.10 lacks (simulate_uniform_ranks).
    """
    future = Future()
    future.set_result(tensors)
    return _create_work_from_future(future).boxed()


def connect_to_nobody(ranks):
    """From now on `torch.distributed.init_process_group` makes this process rank 0 of `ranks`, and
    sends nothing. Each collective answers as if all other ranks held the same as this one. So
    shapes and calls are right, but values are not.
    """
    connect = distributed_c10d.init_process_group

    def init_process_group(*args, **options):
        connect("fake", store=FakeStore(), rank=0, world_size=ranks)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
