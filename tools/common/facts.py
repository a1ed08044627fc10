"""What collectives send, a container's quota of CPU time, and how much of a GPU's peak a run
uses.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def sent_share(collective: str, ranks: int) -> float:
    """The share of the whole tensor's bytes that a device sends, on average over the devices. In a
    reduce or broadcast, all devices but one send the whole tensor.
    """
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def cpu_quota(file: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    """The cores whose time this process's container may use, or None without a quota. All cores are
    visible there: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    with suppress(OSError, ValueError):  # "max" is no number
        quota, period = map(int, Path(file).read_text().split())
        return quota / period
    return None


# Peak FLOP/s of 16-bit products (bf16, fp16) summed in fp32, and of TF32, which the scripts turn on
# for fp32; without sparsity, from NVIDIA's data sheets. The names are torch's, and complete: an
# H100 PCIe or NVL is slower than the H100 of a DGX.
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
    """MFU, the share of the devices' peak: 6 FLOPs for each token and parameter of the layers, but
    none for embeddings and attention scores: https://arxiv.org/abs/2001.08361, section 2.1. None
    for a device whose peak is not known, and for a model that is not a transformer.
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
