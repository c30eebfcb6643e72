"""Every kernel family compiles with NVRTC for every architecture that gnnaccel supports."""
from __future__ import annotations

import ctypes

import pytest

from gnnaccel.cuda.runtime import nvrtc, sources
from gnnaccel.cuda.runtime.nvrtc import ARCHITECTURES
from tests.cuda import variants
from tests.helpers import needs_nvrtc

pytestmark = needs_nvrtc

# Uses all of common.cuh, so that the header is compiled even where no family happens to use a part
# of it.
COMMON = """
#include "common.cuh"
template <typename T, int N> __device__ void twice(const T* x, T* y) {
    float v[N];
    load_pack<T, N>(x, v);
    for (int i = 0; i < N; ++i) v[i] = lane_max<8>(lane_sum<32>(v[i])) + quiet_nan() + infinity();
    store_pack<T, N>(y, v);
}
extern "C" __global__ void all_of_it(const float* a, float* b, const f16* c, f16* d, const bf16* e, bf16* f, u64 seed) {
    DYNAMIC_SHARED(bytes);
    bytes[threadIdx.x] = (unsigned char)uniform01(philox<10>(seed, 1, threadIdx.x).x);
    twice<float, 1>(a, b); twice<float, 2>(a, b); twice<float, 4>(a, b);
    twice<f16, 1>(c, d); twice<f16, 2>(c, d); twice<f16, 4>(c, d); twice<f16, 8>(c, d);
    twice<bf16, 1>(e, f); twice<bf16, 2>(e, f); twice<bf16, 4>(e, f); twice<bf16, 8>(e, f);
}
"""


def _cases():
    """(family, defines) of every family."""
    if nvrtc.found_at() is None:
        return []
    return [(family, tuple(defines)) for family in sources.families()
            for defines in variants.sample_defines(family)]


def _builds():
    """(family, defines, architecture): the first of every family for all; everything for one that
    has all, every other one for the oldest, which lacks most, and a part for each of those in
    between, each another part."""
    first, builds = {}, []
    for number, (family, defines) in enumerate(_cases()):
        alone = first.setdefault(family, number) == number
        builds += [(family, defines, arch) for place, arch in enumerate(ARCHITECTURES)
                   if alone or arch == 90 or (number + place) % (2 if arch == 75 else 15) == 0]
    return builds


def _name(build):
    family, defines, arch = build
    return "-".join([family, *(f"{name}={value}" for name, value in defines), str(arch)])


def _compiles(family, defines, arch):
    return nvrtc.cubin(family, defines, arch)[:4] == b"\x7fELF"


@pytest.mark.long
@pytest.mark.parametrize("build", _builds(), ids=_name)
def test_family_compiles(build):
    assert _compiles(*build)


@pytest.mark.long
def test_each_family_compiles_for_one_architecture():
    first = dict(reversed(_cases()))
    for number, (family, defines) in enumerate(first.items()):
        assert _compiles(family, defines, ARCHITECTURES[number % len(ARCHITECTURES)])


def test_what_the_compiler_says_of_a_definition_names_the_files_own_lines():
    first = sources.source("gather").split("\n", 1)[0]
    with pytest.raises(nvrtc.NvrtcError, match=r"gather\.cu\(1\): error"):
        nvrtc.compile_text(sources.defined("gather",
                                           (("N", "1"),
                                            )).replace(first, f"no_such_type x; {first}", 1), (),
                           80)


def test_every_family_has_define_sets():
    # a family without any would be compiled nowhere, and the test above would not say so
    assert {family for family, _ in _cases()} == set(sources.families())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_common_header_compiles(arch):
    assert nvrtc.compile_text(sources.inline(COMMON), (), arch)[:4] == b"\x7fELF"


def test_all_architectures_are_known_to_this_nvrtc():
    library, count = nvrtc._library(), ctypes.c_int()
    assert library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    values = (ctypes.c_int * count.value)()
    assert library.nvrtcGetSupportedArchs(values) == 0
    assert set(ARCHITECTURES) <= set(values)


def test_a_wrong_text_is_refused_with_its_log():
    with pytest.raises(nvrtc.NvrtcError, match="no_such_function.*undefined"):
        nvrtc.compile_text('extern "C" __global__ void k() { no_such_function(VALUE); }',
                           (("VALUE", "1"),), 80)
