"""What a record says of a run that formulas need to know, and its share of a GPU's peak (MFU)."""

from collections.abc import Mapping
from typing import Any

ARCHITECTURE = ["layers", "hidden_size", "intermediate_size", "positions"]  # of a transformer
UNREADABLE = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError


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
    """The ranks that divide a model among them: in HSDP `dp_shard_size` of a record's
    `strategy_options`, and else all.
    """
    return int(options.get("dp_shard_size", devices))


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


def flops_utilization(row: Mapping[str, Any]) -> float | None:
    """MFU: of the devices' peak, 6 FLOPs a token and parameter of the layers, without embeddings:
    https://arxiv.org/abs/2001.08361, section 2.1. Products of queries and keys are not counted.
    None for a device whose peak is not known, and for a model that is no transformer.
    """
    peaks, precision = PEAK.get(row["device_name"]), row["precision"]
    if peaks is None or precision not in ("bf16", "fp16", "no"):
        return None
    if not row["tokens_per_second"] or not row.get("layers"):
        return None
    peak: float = row["devices"] * (peaks[1] if precision == "no" else peaks[0])
    hidden = row["hidden_size"]
    parameters = row["layers"] * (4 * hidden * hidden + 2 * hidden * row["intermediate_size"])
    flops: float = 6 * parameters * row["tokens_per_second"]
    return flops / peak
