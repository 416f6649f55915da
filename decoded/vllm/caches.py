"""vLLM's KV caches as the daemon's layouts know them: tensors per layer, KV groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decoded.kv.layout import LayoutError
from decoded.wire.layout import KvGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Caches:
    """One worker's KV caches.

    `tensors`: per layer, in the order of a forward pass, its tensors (K and V, or MLA
    parts, or one that holds both), each of shape (kernel blocks, ...). `groups`: the KV
    groups that are transferred; `group_of`: each layer's index in it.
    """

    tensors: dict[str, tuple[torch.Tensor, ...]]
    groups: list[KvGroup]
    group_of: dict[str, int]

    @property
    def device_type(self) -> str:
        """Where they are: cpu, npu, cuda."""
        first = next(iter(self.tensors.values()))
        return str(first[0].device.type)


def transfer_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Indices of the KV groups whose blocks are transferred; vLLM 0.27 knows no others."""
    chosen = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if chosen is None else tuple(chosen)


def read_caches(kv_caches: dict[str, Any], kv_cache_config: Any) -> Caches:
    """What `register_kv_caches` was given, by the groups of its KVCacheConfig.

    Layers that share another's cache are left out: their blocks are transferred with it.
    Raises LayoutError for caches that no producer could write to, naming the layer.
    """
    num_blocks = int(kv_cache_config.num_blocks)
    groups: list[KvGroup] = []
    group_of: dict[str, int] = {}
    for index in transfer_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[index]
        for name in group.layer_names:
            group_of[name] = len(groups)
        groups.append(KvGroup(int(group.kv_cache_spec.block_size), num_blocks))
    missing = sorted(group_of.keys() - kv_caches.keys())
    if missing:
        raise LayoutError(f"vLLM gave no KV cache for layer {missing[0]!r}")
    tensors: dict[str, tuple[torch.Tensor, ...]] = {}
    seen: set[tuple[int, int]] = set()
    for name, cache in kv_caches.items():
        if name not in group_of:
            continue
        parts = _parts(name, cache, num_blocks)
        place = group_of[name], parts[0].data_ptr()
        if place not in seen:
            seen.add(place)
            tensors[name] = parts
    if not tensors:
        raise LayoutError("vLLM gave no KV caches: this model has nothing to transfer")
    return Caches(tensors, groups, {name: group_of[name] for name in tensors})


def _parts(name: str, cache: Any, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """A layer's tensors, each with its blocks in the first dimension."""
    if isinstance(cache, list | tuple):
        return tuple(part for each in cache for part in _parts(name, each, num_blocks))
    shape = tuple(cache.shape)
    # K and V stacked, as FlashAttention has them: (2, blocks, ...).
    if len(shape) > 2 and shape[0] == 2 and num_blocks > 2 and shape[1] % num_blocks == 0:
        return cache[0], cache[1]
    if shape and shape[0] and shape[0] % num_blocks == 0:
        return (cache,)
    raise LayoutError(
        f"layer {name!r} has a KV cache of shape {shape}: neither its first dimension nor, behind "
        f"a 2 for K and V, its second is a multiple of the {num_blocks} blocks"
    )
