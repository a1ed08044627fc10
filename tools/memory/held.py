"""What a rank holds, counted: its tensors, and the most that torch's allocator had in a step."""

import itertools

from torch import autograd
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile

REDUCED = "gradients are reduced"  # the name of an event


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

    inner = optimizer
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


def record_allocations():
    """Begin to note what torch's allocator does. Raises RuntimeError if a profiler runs already.

    torch's own `profile` also notes all operators. In a step of ZeRO-3 on 4,096 ranks these are
    millions, and each of them takes a kB.
    """
    usual = profile(profile_memory=True)
    config, activities = usual.config(create_trace_id=False), usual.kineto_activities
    autograd._prepare_profiler(config, activities)
    autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})


def most_allocated():
    """End `record_allocations`. By how many bytes the allocator exceeded, at most, what it had at
    the event REDUCED, a torch.autograd.profiler.record_function.
    """
    total = most = at_update = 0
    events = autograd._disable_profiler().events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == REDUCED:
            at_update = total
        elif event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most - at_update
