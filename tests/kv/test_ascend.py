"""What `ascend` is told by the environment, and what memory it can register."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decoded.kv.ascend import AscendSettings, ascend_environment, ascend_timeout_s
from decoded.kv.errors import RegionError
from decoded.kv.layout import LayoutError, moved, spans
from decoded.kv.memory import check_ascend, open_engine
from decoded.kv.npu import ALIGNMENT, local_index, machine_number
from decoded.kv.transfer import TransferError
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, NpuHandle, Region

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("settings", "environ", "milliseconds"),
    [
        # The value that vllm-ascend derives from HCCL's defaults, 20 and 7.
        (AscendSettings(), {}, 33064),
        (AscendSettings(), {"HCCL_RDMA_TIMEOUT": "17", "HCCL_RDMA_RETRY_CNT": "3"}, 4610),
        (AscendSettings(rdma_timeout=17, rdma_retries=3), {"HCCL_RDMA_RETRY_CNT": "7"}, 4610),
        (AscendSettings(), {"ASCEND_TRANSFER_TIMEOUT": "10000"}, 10000),
        (AscendSettings(transfer_timeout_ms=500), {"ASCEND_TRANSFER_TIMEOUT": "10000"}, 500),
    ],
)
def test_how_long_a_write_lasts(
    settings: AscendSettings, environ: dict[str, str], milliseconds: int
) -> None:
    both = {**environ, **ascend_environment(settings, environ)}
    assert both["ASCEND_TRANSFER_TIMEOUT"] == str(milliseconds)
    assert ascend_timeout_s(settings, environ) == 2 * milliseconds / 1000


def test_what_is_configured_goes_into_the_environment() -> None:
    settings = AscendSettings(transfer_timeout_ms=1, connect_timeout_ms=2, base_port=3)
    assert ascend_environment(settings, {}) == {
        "ASCEND_TRANSFER_TIMEOUT": "1",
        "ASCEND_CONNECT_TIMEOUT": "2",
        "ASCEND_BASE_PORT": "3",
    }


@pytest.mark.parametrize("name", ["HCCL_RDMA_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='soon'"):
        ascend_timeout_s(AscendSettings(), {name: "soon"})


@pytest.mark.parametrize(
    ("visible", "numbers"), [(None, [0, 1, 2]), ("", [0, 1, 2]), ("5, 3,7", [5, 3, 7])]
)
def test_numbers_of_npus(visible: str | None, numbers: list[int]) -> None:
    environ = {} if visible is None else {VISIBLE: visible}
    assert [machine_number(index, environ) for index in range(3)] == numbers
    assert [local_index(number, environ) for number in numbers] == [0, 1, 2]


def test_npus_that_are_not_visible() -> None:
    with pytest.raises(RegionError, match=f"NPU 4 is not among.*{VISIBLE}=5,3"):
        local_index(4, {VISIBLE: "5,3"})
    with pytest.raises(RegionError, match="give numbers"):
        local_index(4, {VISIBLE: "all"})


def layout_of(
    offsets: Sequence[tuple[int, int]], blocks: int = 4, regions: int = 1, size: int = 1 << 20
) -> KvLayout:
    """One layer per (region, offset), each with a tensor of `blocks` blocks of 1 KiB."""
    layers = [
        KvLayer(f"layer.{number}", 0, [KvTensor(region, offset, 1024)])
        for number, (region, offset) in enumerate(offsets)
    ]
    places = [Region(f"r{number}", size) for number in range(regions)]
    return KvLayout(places, [KvGroup(16, blocks)], layers)


def test_spans_go_from_the_first_tensor_to_the_last_one_s_end() -> None:
    layout = layout_of([(0, 9000), (1, 0), (0, 1000)], regions=3)
    assert spans(layout) == [(1000, 9000 + 4096 - 1000), (0, 4096), (0, 1 << 20)]


def test_a_layout_moves_with_its_regions() -> None:
    layout = layout_of([(0, 0), (1, 512)], regions=2)
    elsewhere = [Region("a", 1 << 21), Region("b", 1 << 21)]
    there = moved(layout, elsewhere, [100, 7])
    assert there.regions == elsewhere
    assert [layer.tensors[0].offset for layer in there.layers] == [100, 519]


def test_what_ascend_can_register() -> None:
    # The storage begins anywhere; the first tensor does not.
    check_ascend(layout_of([(0, 512), (0, 8192)]), [5 * ALIGNMENT - 512])


@pytest.mark.parametrize(
    ("layout", "address", "said"),
    [
        (layout_of([(0, 8192), (0, 512)]), 5 * ALIGNMENT, "'layer.1' begins at .* 2 MiB"),
        (layout_of([(0, 0)], blocks=1), ALIGNMENT, "'layer.0' has one block.*block 0"),
        (
            layout_of([(number, 0) for number in range(257)], regions=257),
            ALIGNMENT,
            "'layer.256' is in memory region 257 of 257.*registers 256",
        ),
    ],
)
def test_what_ascend_cannot_register_names_the_layer(
    layout: KvLayout, address: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        check_ascend(layout, [address] * len(layout.regions))


def test_an_npu_s_memory_is_not_for_tcp() -> None:
    handle = NpuHandle(0, b"h", 1 << 20, 0, b"r", 0, b"e", True)
    layout = layout_of([(0, 0)])
    layout = moved(layout, [Region("npu", 1 << 20, handle)], [0])
    with pytest.raises(TransferError, match="tcp does not reach"):
        open_engine(layout, [ALIGNMENT], "127.0.0.1", "tcp", "")
