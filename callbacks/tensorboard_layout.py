"""The charts of TensorBoard's page "Custom Scalars": the few that tell how a run goes, the same in every run."""

LAYOUT = {
    "acceptance": {
        "decoded tau with its 95 % interval": ["Margin", ["decode/tau", "decode/tau_low", "decode/tau_high"]],
        "tau: decoded, and teacher-forced": [
            "Multiline",
            ["decode/tau$", "decode/teacher_forced_tau$", "val/teacher_forced_tau$"],
        ],
        "speed-up over plain decoding": ["Multiline", ["decode/speedup$"]],
        "accuracy by slot, validation": ["Multiline", ["val/accuracy_slot_.*"]],
    },
    "training": {
        "loss": ["Multiline", ["train/loss$", "val/loss$"]],
        "learning rate": ["Multiline", ["train/learning_rate.*"]],
        "gradient norm before clipping": ["Multiline", ["train/grad_norm$"]],
    },
    "speed": {
        "label tokens a second": ["Multiline", ["perf/label_tokens_per_second$"]],
        "shares: data wait, padding, decoding": [
            "Multiline",
            ["perf/data_wait_share$", "perf/padding_share$", "decode/time_share$"],
        ],
        "memory at most, GiB": ["Multiline", ["perf/device_memory_gib$", "perf/host_memory_gib$"]],
    },
}
"""Category -> title -> kind and tags, as `SummaryWriter.add_custom_scalars` takes it. A tag of a Multiline chart is a
pattern that is matched from the start of a name."""
