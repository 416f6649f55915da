"""Which cores engines get."""

from __future__ import annotations

import pytest

from decoded.cluster.cores import share_cores


@pytest.mark.parametrize(
    ("cores", "p", "d", "tp", "p_side", "d_side"),
    [
        (range(2), 1, 1, 1, ["0"], ["1"]),
        (range(2), 2, 1, 1, ["0", "0"], ["1"]),
        (range(2), 1, 1, 2, ["0|1"], ["0|1"]),
        (range(1), 1, 1, 1, ["0"], ["0"]),
        (range(1), 1, 1, 2, ["0|0"], ["0|0"]),
        (range(8), 1, 1, 1, ["0,1,2,3"], ["4,5,6,7"]),
        (range(8), 2, 1, 1, ["0,1", "2,3"], ["4,5,6,7"]),
        ([3, 5], 1, 1, 1, ["3"], ["5"]),
        (range(2), 0, 1, 1, [], ["0,1"]),
    ],
)
def test_sides_share_them(
    cores: list[int], p: int, d: int, tp: int, p_side: list[str], d_side: list[str]
) -> None:
    assert share_cores(p, d, tp, cores) == (p_side, d_side)
