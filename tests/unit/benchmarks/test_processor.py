"""Processor name and flags, and the dtype chosen from them."""

from pathlib import Path

import pytest

from benchmarks.systems.processor import fastest_dtype, read_processor

X86 = """processor\t: 0
model name\t: Some Processor 9
flags\t\t: fpu avx2 amx_tile avx512f amx_bf16 avx512_bf16
processor\t: 1
model name\t: Another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\n"


def test_name_and_flags_are_read_from_the_first_processor(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(X86)
    processor = read_processor(path)
    assert processor.name == "Some Processor 9"
    assert processor.flags == ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    path.write_text(ARM)
    assert read_processor(path).flags == ("asimd", "sve", "bf16")
    assert read_processor(path).name
    assert read_processor(tmp_path / "none").flags == ()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("avx2", "avx512f", "avx512_vnni"), "float32"),
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16"),
        (("avx2", "amx_tile", "amx_bf16"), "bfloat16"),
        (("avx2", "amx_tile", "amx_int8"), "float32"),
        (("asimd", "bf16"), "bfloat16"),
        (("asimd",), "float32"),
        ((), "float32"),
    ],
)
def test_bfloat16_is_chosen_if_the_processor_multiplies_it(
    flags: tuple[str, ...], expected: str
) -> None:
    assert fastest_dtype(flags) == expected
