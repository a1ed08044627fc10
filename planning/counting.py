"""Count what one of many ranks sends and holds: its collectives and its tensors."""

import collections
import itertools

import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future

UPDATE = "gradients are reduced"  # the name of an event


class Tally:
    """Counts collectives: {(kind, size of the group, nodes that it spans): [calls, bytes]}. Bytes
    are those of the whole tensor: what an all-gather makes, or what a reduce-scatter takes.
    """

    def __init__(self, per_node):
        self.per_node = per_node  # rank r is on node r // per_node
        self.found = collections.defaultdict(lambda: [0, 0])

    def add(self, kind, ranks, size):
        """Count a call over these global ranks."""
        nodes = len({rank // self.per_node for rank in ranks})
        entry = self.found[kind, len(ranks), nodes]
        entry[0] += 1
        entry[1] += size

    def rows(self):
        """The collectives as a list of dicts, as in dry_run.json."""
        return [
            {"kind": kind, "group_size": size, "nodes": nodes, "calls": calls, "bytes": volume}
            for (kind, size, nodes), (calls, volume) in sorted(self.found.items())
        ]


def finished(result):
    """A finished collective. DDP's reducer, in C++, reads the result from the future."""
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class CountingGroup(dist.ProcessGroup):
    """A process group with one real rank. It counts each collective, and answers as if all other
    ranks held the same as this one. So shapes and calls are right, but values are not.

    torch's own ProcessGroup has the same methods, and says what they take. Those that are not here
    raise torch's RuntimeError, so no collective goes uncounted.
    """

    def __init__(self, rank, ranks, tally):
        super().__init__(rank, len(ranks))
        self.ranks = ranks  # their global numbers
        self.tally = tally

    def getBackendName(self):
        return "counting"

    # DeviceMesh reads the group's name. The C++ class stores none for a group made in Python.
    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def _set_group_desc(self, text):
        pass

    def _count(self, kind, tensors, result):
        self.tally.add(kind, self.ranks, sum(tensor.nbytes for tensor in tensors))
        return finished(result)

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
        return self.all_gather_single_coalesced([out], [own])

    def all_gather_single_coalesced(self, outs, owns, opts=None):
        for out, own in zip(outs, owns, strict=True):
            out.view(len(self.ranks), -1).copy_(own.reshape(1, -1).expand(len(self.ranks), -1))
        return self._count("all_gather", outs, outs)

    def reduce_scatter_single(self, out, whole, opts=None):
        return self.reduce_scatter_single_coalesced([out], [whole])

    def reduce_scatter_single_coalesced(self, outs, wholes, opts=None):
        for out, whole in zip(outs, wholes, strict=True):
            out.view(-1).copy_(whole.reshape(-1)[: out.numel()])
        return self._count("reduce_scatter", wholes, outs)

    # The names before torch 2.15.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def connect_counting_groups(ranks, tally):
    """From now on `torch.distributed.init_process_group` makes this process rank 0 of `ranks`, and
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


# -------- what the rank holds


def count_held(model, optimizer):
    """The bytes that this rank holds of parameters, gradients, optimizer states, and of DeepSpeed's
    fp32 copy of the parameters, by storage: a view counts once.
    """
    groups = {name: {} for name in ("parameters", "gradients", "states", "master_copy")}

    def count(group, tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        # Leave out the counters of steps, and what is offloaded.
        if tensor is not None and tensor.numel() > 1 and tensor.device.type != "meta":
            groups[group][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    inner = optimizer.optimizer
    for parameter in model.parameters():
        count("parameters", parameter)
        count("parameters", getattr(parameter, "ds_tensor", None))
        count("gradients", parameter.grad)
    if hasattr(inner, "averaged_gradients"):  # DeepSpeed's own optimizer, around the script's
        for gradient in itertools.chain(*filter(None, inner.averaged_gradients.values())):
            count("gradients", gradient)
        # The first is of ZeRO-1 and ZeRO-2, the second of ZeRO-3.
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            for part in getattr(inner, name, []):
                count("master_copy", part)
                count("gradients", part.grad)
        inner = inner.optimizer
    for value in itertools.chain(*(state.values() for state in inner.state.values())):
        count("states", value)
    held = {name: sum(group.values()) for name, group in groups.items()}
    # If gradients are not views of DDP's buckets, the buckets lie beside them.
    separate = len(groups["gradients"]) == sum(1 for _ in model.parameters())
    if separate and hasattr(model, "reducer"):
        held["gradients"] *= 2
    return held


def most_allocated(events):
    """By how many bytes torch's allocator exceeded, at most, what it had at the event UPDATE.
    `events` are those of a profile with `profile_memory`.
    """
    total = most = at_update = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == UPDATE:
            at_update = total
        elif event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most - at_update
