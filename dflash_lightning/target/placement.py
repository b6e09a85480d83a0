"""Where a target's weights lie: on one device, or, if that is too small, split over several."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.utils import convert_file_size_to_int
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from dflash_lightning.devices import resolve_device
from dflash_lightning.errors import ConfigError, TargetError


@dataclass(frozen=True)
class Placement:
    """One way to place a target: a device, tensor parallelism over processes, or a device map in one process.

    Attributes:
        device: the device that holds the whole target: auto, cpu, cuda or cuda:N.
        tensor_parallel_size: processes that hold the target together, each a slice of every layer. They are one
            torch.distributed group (`distributed.form_groups`), each process on the GPU of its local rank.
        device_map: "auto" places layer after layer on the GPUs of this node, then in its memory, then leaves the rest
            on disk, read anew in every forward (transformers' device map, by accelerate).
        max_memory: what a device map may use at most, by device: {0: "70GiB", "cpu": "100GiB"}.

    Raises:
        ConfigError: the settings contradict each other, or a size can't be read.
    """

    device: str = "auto"
    tensor_parallel_size: int = 1
    device_map: Literal["auto"] | None = None
    max_memory: dict[int | str, str] | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size is {self.tensor_parallel_size}; expected at least 1.")
        chosen = {
            "device": self.device != "auto",
            "tensor_parallel_size": self.tensor_parallel_size > 1,
            "device_map": self.device_map is not None,
        }
        if sum(chosen.values()) > 1:
            names = " and ".join(name for name, set_ in chosen.items() if set_)
            raise ConfigError(f"{names} each say where the target lies. Give one of them.")
        if self.max_memory and not self.device_map:
            raise ConfigError("max_memory limits a device map, and there is none. Give device_map too, or neither.")
        devices = [*range(torch.cuda.device_count()), "cpu"]
        for device, size in (self.max_memory or {}).items():
            if device not in devices:
                raise ConfigError(f"max_memory names {device!r}; expected devices of this machine: {devices}.")
            try:
                convert_file_size_to_int(size)
            except ValueError as error:
                raise ConfigError(f"max_memory of {device} is {size!r}; expected such as 70GiB or 500MB.") from error

    def check(self, target: str, text_config: PreTrainedConfig, local_rank: int) -> None:
        """Refuse a device that isn't there, and a target that can't be placed so.

        Args:
            target: name of the target.
            text_config: what `target_text_config` says of it.
            local_rank: number of this process on its node.

        Raises:
            ConfigError: there is no such device, the target's heads can't be divided, or several processes of a node
                would each map a target.
            TargetError: transformers has no plan to slice this target, or a GGUF file would be read layer by layer.
        """
        resolve_device(self.device, local_rank)
        size = self.tensor_parallel_size
        if size > 1:
            if not text_config.base_model_tp_plan:
                raise TargetError(
                    f"Target {target!r}: transformers has no tensor parallel plan for model type "
                    f"{text_config.model_type!r}. Use device_map."
                )
            heads, kv_heads = text_config.num_attention_heads, text_config.num_key_value_heads
            if heads % size or kv_heads % size:
                raise ConfigError(
                    f"tensor_parallel_size is {size}, but target {target!r} has {heads} attention heads and "
                    f"{kv_heads} key-value heads. Expected a size that divides both."
                )
        if self.device_map:
            if target.lower().endswith(".gguf"):
                raise TargetError(
                    f"Target {target!r}: a GGUF file is unpacked as a whole, so a device map doesn't make it fit. "
                    "Save it as a transformers folder first (dflash_lightning.target.convert_gguf)."
                )
            if local_rank > 0:
                raise ConfigError(
                    "device_map gives a target all devices of its node, and there are several processes here. Start "
                    "one process a node."
                )

    def device_kind(self, local_rank: int) -> str:
        """Kind of device that computes, cpu or cuda. With a device map, GPUs also compute the layers kept elsewhere.

        Raises:
            ConfigError: there is no such device.
        """
        return resolve_device(self.device, local_rank).type

    def arguments(self, local_rank: int) -> dict[str, Any]:
        """The arguments of `from_pretrained` that place the weights so.

        Raises:
            ConfigError: there is no such device.
        """
        if self.tensor_parallel_size > 1:
            return {"distributed_config": DistributedConfig(tp_size=self.tensor_parallel_size)}
        if self.device_map:
            return {"device_map": self.device_map, "max_memory": self.max_memory}
        return {"device_map": {"": resolve_device(self.device, local_rank)}}
