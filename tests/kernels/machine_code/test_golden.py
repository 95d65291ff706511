"""The golden record of machine code: what it takes for the same, and what not."""

from __future__ import annotations

import checkouts
import golden

CODE = """\
// generated
.visible .entry some_kernel(.param .u64 some_kernel_param_0) // a comment
{
\tld.param.u64 %rd1, [some_kernel_param_0];

\tst.release.sys.global.b64 [%rd1], %rd2;
}
"""


def test_a_kernels_name_and_comments_do_not_count() -> None:
    renamed = CODE.replace("some_kernel", "gemm_all_scatter_copies").replace("// generated\n", "")
    assert renamed != CODE
    assert golden.normalised(renamed, "gemm_all_scatter_copies") == golden.normalised(CODE, "some_kernel")


def test_an_instruction_counts() -> None:
    weakened = CODE.replace("st.release.sys", "st.relaxed.sys")
    assert golden.normalised(weakened, "some_kernel") != golden.normalised(CODE, "some_kernel")


def test_cases_that_change_come_and_go_are_listed() -> None:
    base = {"same": [["a", 1, 2, 0]], "changed": [["a", 1, 2, 0]], "gone": [["a", 1, 2, 0]]}
    now = {"same": [["a", 1, 2, 0]], "changed": [["a", 1, 3, 0]], "new": [["a", 1, 2, 0]]}
    assert [line.split("\n")[0] for line in golden.differences(base, now)] == ["changed", "gone", "new"]


def test_all_packages_are_found() -> None:
    assert {"iris_core", "iris_kernels"} <= checkouts.package_folders(checkouts.TREE).keys()
