"""A problem as the cost model sees it: what makes none, and others with more or fewer rows."""

from __future__ import annotations

import pytest

from overlap_taxonomy import MACHINES, Work, list_families, list_variants, predict_us

H200 = MACHINES["h200x4"]


def test_sums_are_of_fp8_alone() -> None:
    with pytest.raises(ValueError, match="sums are 'fast'; with elements of 2 bytes they are one of"):
        Work("all_gather_gemm", 64, 64, 64, 2, sums="fast")
    with pytest.raises(ValueError, match="sums are ''; with elements of 1 bytes they are one of"):
        Work("all_gather_gemm", 64, 64, 64, 2, 1)


@pytest.mark.parametrize("family", list_families())
def test_a_product_with_other_rows_is_predicted_as_one_that_was_made_with_these(family: str) -> None:
    for options in ({}, {"out_bytes": 4, "normed_share": 0.5}, {"element_bytes": 1, "sums": "block"}):
        for n, k in ((4096, 8192), (4097, 8192), (4096, 8190)):
            few, many = (Work(family, m, n, k, 4, **options) for m in (7, 3000))
            assert [predict_us(H200, one.name, many) for one in list_variants(family)]  # which keeps what it computes
            other = many.with_rows(7)
            assert (other, hash(other), other.product, other.kind) == (few, hash(few), few.product, few.kind)
            for one in list_variants(family):
                assert predict_us(H200, one.name, other) == predict_us(H200, one.name, few)
