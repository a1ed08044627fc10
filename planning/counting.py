"""What one rank of many sends and holds, as counted: its collectives and its tensors."""

import collections
import itertools
from dataclasses import dataclass

import torch.distributed as dist
from torch.futures import Future

UPDATE = "gradients are reduced"  # the name of an event


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
        return True

    def is_completed(self):
        return True

    def is_success(self):
        return True

    def get_future(self):
        return self._future


def bytes_of(tensors):
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
        self.tally.add(kind, self.ranks, bytes_of(tensors))
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


NOT_COUNTED = """all_to_all_single allgather_coalesced alltoall alltoall_base gather
gather_into_tensor gather_single monitored_barrier recv recv_anysource reduce_scatter scatter
send"""
for _name in NOT_COUNTED.split():
    setattr(CountingGroup, _name, _refuse(_name))


# -------- what the rank holds


def count_held(model, optimizer):
    """The bytes that this rank holds of parameters, gradients, optimizer states, and of DeepSpeed's
    copy of the parameters in fp32, by storage: a view counts once.
    """
    groups = {name: {} for name in ("parameters", "gradients", "states", "master_copy")}

    def count(group, tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        # Not the counters of steps, and nothing that is offloaded.
        if tensor is not None and tensor.numel() > 1 and tensor.device.type != "meta":
            groups[group][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    inner = optimizer.optimizer
    for parameter in model.parameters():
        count("parameters", parameter)
        count("parameters", getattr(parameter, "ds_tensor", None))
        count("gradients", parameter.grad)
    if hasattr(inner, "averaged_gradients"):  # DeepSpeed's own optimizer, around the script's
        count_zeros_parts(inner, count)
        inner = inner.optimizer
    for value in itertools.chain(*(state.values() for state in inner.state.values())):
        count("states", value)
    held = {name: sum(group.values()) for name, group in groups.items()}
    # DDP's buckets are seen in the gradients that are views of them, or else lie beside these.
    lone = len(groups["gradients"]) == sum(1 for _ in model.parameters())
    if lone and hasattr(model, "reducer"):
        held["gradients"] *= 2
    return held


def count_zeros_parts(optimizer, count):
    """Call `count(group, tensor)` for what DeepSpeed's optimizer holds, of ZeRO-1 to ZeRO-3."""
    for gradient in itertools.chain(*filter(None, optimizer.averaged_gradients.values())):
        count("gradients", gradient)
    # Of ZeRO-1 and ZeRO-2, and of ZeRO-3.
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
        for part in getattr(optimizer, name, []):
            count("master_copy", part)
            count("gradients", part.grad)


def most_allocated(events):
    """By how many bytes torch's allocator exceeded, at the most, what it had at the event UPDATE.
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
