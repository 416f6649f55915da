"""The single-process run: the same prompts, prefilled and decoded without any transfer."""

from __future__ import annotations

import mmap
from itertools import islice

from .cache import BlockPool, PagedCache
from .lines import Parent
from .model import Model, decode, prepare_torch
from .scenario import NEW_TOKENS, P_BLOCKS, make_batch
from .shape import BLOCK_SIZE, kv_layout


def main() -> None:
    parent = Parent()
    prepare_torch()
    model = Model()
    layout = kv_layout(P_BLOCKS, "reference")
    with mmap.mmap(-1, layout.regions[0].size) as memory:
        cache = PagedCache(layout, memoryview(memory))
        for request in filter(lambda one: one.decoded, make_batch()):
            count = len(request.prompt)
            blocks = BlockPool(P_BLOCKS).take(-(-(count + NEW_TOKENS) // BLOCK_SIZE))
            hidden = model.embed(request.prompt)
            for index in range(model.shape.layers):
                hidden = model.prefill_layer(index, hidden, count, cache, blocks)
            tokens = list(islice(decode(model, request.prompt, cache, blocks), NEW_TOKENS))
            parent.tell("tokens", id=request.external_id, tokens=tokens)
        parent.tell("finished")
        cache.close()


if __name__ == "__main__":
    main()
