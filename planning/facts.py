"""What a record says of a run that formulas need to know."""

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
