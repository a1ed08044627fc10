"""The strategies by name, what a record says of its own, and a run's share of a GPU's peak."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNREADABLE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError


@dataclass(frozen=True)
class Strategy:
    """A YAML of accelerate_configs/: its name in a report, and where it keeps parameters, gradients
    and optimizer states.

    "whole": on each device. "shard": 1/n of it on each of n devices; in HSDP n counts the devices
    that share a replica. "host": each process has its 1/n in the memory of the CPU.
    """

    label: str
    parameters: str
    gradients: str
    states: str


# In the order of tables. Where each part is: sections 5.1 to 5.3 of ZeRO,
# https://arxiv.org/abs/1910.02054; the host is that of ZeRO-Offload,
# https://arxiv.org/abs/2101.06840. DeepSpeed's ZeRO-1 divides the gradients as well.
STRATEGIES = {
    "baseline": Strategy("baseline", "whole", "whole", "whole"),
    "dp": Strategy("DP", "whole", "whole", "whole"),  # on GPU 0
    "ddp": Strategy("DDP", "whole", "whole", "whole"),
    "fsdp": Strategy("FSDP", "shard", "shard", "shard"),
    # What fsdp_keep gathers and keeps is in memory.bytes_of_buffers.
    "fsdp_keep": Strategy("FSDP keep", "shard", "shard", "shard"),
    "fsdp_offload": Strategy("FSDP offload", "host", "host", "host"),
    "hsdp": Strategy("HSDP", "shard", "shard", "shard"),
    "zero1": Strategy("ZeRO-1", "whole", "shard", "shard"),
    "zero2": Strategy("ZeRO-2", "whole", "shard", "shard"),
    "zero2_offload": Strategy("ZeRO-2 offload", "whole", "host", "host"),
    "zero3": Strategy("ZeRO-3", "shard", "shard", "shard"),
    "zero3_offload": Strategy("ZeRO-3 offload", "host", "host", "host"),
}

# HSDP's sizes in a record's `strategy_options`; the launcher's names have a prefix.
REPLICAS, SHARDS = "dp_replicate_size", "dp_shard_size"


def name_yaml(strategy, options):
    """The YAML of accelerate_configs/ that a record's `strategy` and `strategy_options` are from:
    "fsdp_keep" is "fsdp" that does not reshard. The strategy itself for other options.
    """
    keeps = str(options.get("reshard_after_forward")).lower() == "false"
    offloads = str(options.get("offload_params")).lower() == "true"
    if strategy == "fsdp" and keeps != offloads:
        return "fsdp_keep" if keeps else "fsdp_offload"
    on_host = [
        (options.get(name) or {}).get("device") == "cpu"
        for name in ("offload_optimizer", "offload_param")
    ]
    offloaded = [strategy, *on_host] in (["zero2", True, False], ["zero3", True, True])
    return f"{strategy}_offload" if offloaded else strategy


def shards_of(options, devices):
    """The ranks that divide a model among them: in HSDP those of a replica, and else all."""
    return int(options.get(SHARDS, devices))


def bus_share(collective, ranks):
    """Of the whole tensor's bytes, how many the slowest link carries at least. Bus bandwidth counts
    these bytes. It is the link's own, and hardly depends on the number of ranks:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}.get(collective)
    return share * (ranks - 1) / ranks if share else 1


# Peak FLOP/s of 16-bit products (bf16, fp16) that add up in fp32, and of TF32, which the scripts
# turn on for fp32; without sparsity, from NVIDIA's data sheets. Names are whole, as in torch:
# an H100 PCIe or NVL is slower than the H100 of a DGX.
# https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
# https://www.nvidia.com/en-us/data-center/h100/ h200/ and l40s/; for the RTX 4090 appendix A of
# https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
PEAK = {
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494e12),  # SXM
    "NVIDIA H100 PCIe": (756e12, 378e12),
    "NVIDIA H100 NVL": (835e12, 417e12),
    "NVIDIA H200": (989e12, 494e12),  # SXM
    "NVIDIA H200 NVL": (835e12, 417e12),
    "NVIDIA L40S": (362e12, 183e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12),
}


def flops_utilization(run: Mapping[str, Any]) -> float | None:
    """MFU: of the devices' peak, 6 FLOPs a token and parameter of the layers, without embeddings:
    https://arxiv.org/abs/2001.08361, section 2.1. Products of queries and keys are not counted.
    None for a device whose peak is not known, and for a model that is no transformer.
    """
    peaks, precision = PEAK.get(run["device_name"]), run["precision"]
    if peaks is None or precision not in ("bf16", "fp16", "no"):
        return None
    sizes: list[Any] = [run.get(name) for name in ("layers", "hidden_size", "intermediate_size")]
    if not run["tokens_per_second"] or not all(sizes):
        return None
    peak: float = run["devices"] * (peaks[1] if precision == "no" else peaks[0])
    layers, hidden, inner = sizes
    parameters = layers * (4 * hidden * hidden + 2 * hidden * inner)
    flops: float = 6 * parameters * run["tokens_per_second"]
    return flops / peak
