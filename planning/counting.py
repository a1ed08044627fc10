"""Collectives that are counted and not sent: this process is one rank of many."""

import collections
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.futures import Future


@dataclass
class Tally:
    """The collectives of a while: {(kind, size of the group, nodes that it spans): [calls, bytes]}.

    Bytes are those of the whole tensor: of what an all-gather makes, or a reduce-scatter takes.
    """

    per_node: int  # ranks of a node; rank r is on node r // per_node

    def __post_init__(self):
        self.found = collections.defaultdict(lambda: [0, 0])

    def add(self, kind, ranks, size):
        """Count a call over these global ranks."""
        nodes = len({rank // self.per_node for rank in ranks})
        entry = self.found[kind, len(ranks), nodes]
        entry[0] += 1
        entry[1] += size

    def clear(self):
        """Forget all calls."""
        self.found.clear()

    def rows(self):
        """The collectives as a list of dicts, as dry_run.json has them."""
        return [
            {"kind": kind, "group_size": size, "nodes": nodes, "calls": calls, "bytes": volume}
            for (kind, size, nodes), (calls, volume) in sorted(self.found.items())
        ]


class Done(dist._Work):
    """A collective that is over. DDP's reducer, in C++, reads the result from the future."""

    def __init__(self, result):
        super().__init__()
        self._future = Future()
        self._future.set_result(result)

    def wait(self, timeout=None):
        """Nothing is left to wait for."""
        return True

    def is_completed(self):
        """It is."""
        return True

    def is_success(self):
        """Nothing can fail that is not sent."""
        return True

    def get_future(self):
        """The result, as a future that is done."""
        return self._future


def size_of(tensors):
    """The bytes of these tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class CountingGroup(dist.ProcessGroup):
    """A process group of one real rank. It counts each collective, and answers as if all other
    ranks held what this one holds. So shapes and calls are right, and values are not.

    torch calls its methods by the names of its own ProcessGroup, which also say what they take.
    Those that it does not have raise NotImplementedError: nothing is left out in silence.
    """

    def __init__(self, rank, ranks, tally):
        super().__init__(rank, len(ranks))
        self.ranks = ranks  # global ones
        self.tally = tally

    def getBackendName(self):
        """torch asks for it."""
        return "counting"

    # DeviceMesh reads the name. The class in C++ keeps none for a group that is made in Python.
    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        """The name that torch gave the group."""
        return self._name

    def _set_group_desc(self, text):
        pass

    def _count(self, kind, tensors, result):
        self.tally.add(kind, self.ranks, size_of(tensors))
        return Done(result)

    def allreduce(self, tensors, opts=None):
        return self._count("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors, opts=None):
        return self._count("broadcast", tensors, tensors)

    def reduce(self, tensors, opts=None):
        return self._count("reduce", tensors, tensors)

    def barrier(self, opts=None):
        return self._count("barrier", [], [])

    def allgather(self, outs, ins, opts=None):
        for parts, own in zip(outs, ins, strict=True):
            for part in parts:
                part.copy_(own)
        return self._count("all_gather", [part for parts in outs for part in parts], outs)

    def all_gather_single(self, out, own, opts=None):
        out.view(len(self.ranks), -1).copy_(own.reshape(1, -1).expand(len(self.ranks), -1))
        return self._count("all_gather", [out], [out])

    def all_gather_single_coalesced(self, outs, owns, opts=None):
        for out, own in zip(outs, owns, strict=True):
            out.view(len(self.ranks), -1).copy_(own.reshape(1, -1).expand(len(self.ranks), -1))
        return self._count("all_gather", outs, outs)

    def reduce_scatter_single(self, out, whole, opts=None):
        out.view(-1).copy_(whole.reshape(-1)[: out.numel()])
        return self._count("reduce_scatter", [whole], [out])

    def reduce_scatter_single_coalesced(self, outs, wholes, opts=None):
        for out, whole in zip(outs, wholes, strict=True):
            out.view(-1).copy_(whole.reshape(-1)[: out.numel()])
        return self._count("reduce_scatter", wholes, outs)

    # The names before torch 2.15.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _refuse(name):
    def refused(self, *args, **options):
        raise NotImplementedError(f"the dry run cannot count the collective {name}")

    return refused


for _name in (
    "all_to_all_single",
    "allgather_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce_scatter",
    "scatter",
    "send",
):
    setattr(CountingGroup, _name, _refuse(_name))


def connect_counting_groups(ranks, tally):
    """From now on `torch.distributed.init_process_group` makes this process rank 0 of so many, and
    all process groups are CountingGroups.
    """

    def make(options, _):
        members = options.global_ranks_in_group or range(ranks)
        return CountingGroup(options.group_rank, list(members), tally)

    dist.Backend.register_backend("counting", make, extended_api=True, devices=["cpu"])
    connect = distributed_c10d.init_process_group

    def init_process_group(*args, **options):
        connect("counting", store=dist.HashStore(), rank=0, world_size=ranks)

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group
