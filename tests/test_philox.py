"""Philox against the reference's known answers, its CUDA C twin, and statistics."""

import ctypes

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import njit

from lowgpu_kernels.device import f32, u32
from lowgpu_kernels.device.philox import (
    ACTION,
    EXPLORE,
    INIT,
    PERMUTE,
    RESET,
    SAMPLE,
    STEP,
    draw,
    numpy_draw,
    philox4x32,
    unit,
)
from tests.headers import address, compiled

# The first call compiles, and takes longer than hypothesis allows.
compiles = settings(deadline=None)

PURPOSES = [ACTION, RESET, STEP, PERMUTE, INIT, SAMPLE, EXPLORE]

word = st.integers(0, 2**32 - 1)
double_word = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def header():
    return compiled("""
        #include "philox.cuh"
        extern "C" void block(unsigned* w) {
            const uint4 r = philox4x32(make_uint4(w[0], w[1], w[2], w[3]), make_uint2(w[4], w[5]));
            w[0] = r.x; w[1] = r.y; w[2] = r.z; w[3] = r.w;
        }
        extern "C" void drawn(unsigned long long seed, unsigned purpose, unsigned index,
                              unsigned long long step, unsigned* w) {
            const uint4 r = draw(seed, purpose, index, step);
            w[0] = r.x; w[1] = r.y; w[2] = r.z; w[3] = r.w;
        }
        extern "C" unsigned purposes() {
            return ACTION | RESET << 4 | STEP << 8 | PERMUTE << 12 | INIT << 16 | SAMPLE << 20 |
                   EXPLORE << 24;
        }
        extern "C" void units(int n, const unsigned* w, float* u) {
            for (int i = 0; i < n; ++i) u[i] = unit(w[i]);
        }
    """)


def header_block(header, *words):
    buffer = (ctypes.c_uint32 * 6)(*words)
    header.block(buffer)
    return tuple(buffer[:4])


# Salmon et al.'s Random123 1.14, kat_vectors: "philox4x32 10".
@pytest.mark.parametrize(
    "words, want",
    [
        ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_gives_these_words(words, want, header):
    assert philox4x32(*map(u32, words)) == want
    assert header_block(header, *words) == want


@compiles
@given(st.tuples(*[word] * 6))
def test_python_and_cuda_c_agree_bit_for_bit(header, words):
    assert philox4x32(*map(u32, words)) == header_block(header, *words)


@compiles
@given(double_word, st.sampled_from(PURPOSES), word, double_word)
@example(2**64 - 1, INIT, 2**32 - 1, 2**64 - 1)
def test_a_draw_is_the_same_in_python_cuda_c_and_numpy(header, seed, purpose, index, step):
    buffer = (ctypes.c_uint32 * 4)()
    header.drawn(
        ctypes.c_uint64(seed), purpose, ctypes.c_uint32(index), ctypes.c_uint64(step), buffer
    )
    python = draw(np.uint64(seed), u32(purpose), u32(index), np.uint64(step))
    assert python == tuple(buffer)
    assert python == tuple(numpy_draw(seed, purpose, [index], step)[:, 0].tolist())


def test_the_header_names_the_same_purposes(header):
    assert header.purposes() == sum(p << 4 * i for i, p in enumerate(PURPOSES))


@compiles
@given(double_word, double_word, st.data())
def test_a_change_in_any_part_of_the_key_or_counter_changes_the_draw(seed, step, data):
    before = (np.uint64(seed), u32(ACTION), u32(5), np.uint64(step))
    part = data.draw(st.integers(0, 3))
    bit = data.draw(st.integers(0, 63 if part in (0, 3) else 31))
    after = list(before)
    after[part] = after[part] ^ type(after[part])(1 << bit)
    assert draw(*before) != draw(*after)


def test_a_unit_is_24_bits_and_never_one(header):
    """Trap 1 of RELIABILITY: 32-bit conversions round up to 1."""
    words = np.array([0, 1, 255, 256, 2**31, 2**32 - 257, 2**32 - 1], np.uint32)
    want = (words >> 8) / 2**24
    got = np.array([unit(w) for w in words], "f4")
    np.testing.assert_array_equal(got, want)
    assert got[-1] == np.nextafter(f32(1), f32(0)) and got[0] == 0
    twin = np.empty_like(got)
    header.units(len(words), address(words), address(twin))
    np.testing.assert_array_equal(twin, want)


@njit
def _count(seed, purpose, draws, cells):
    counts = np.zeros((4, cells), np.int64)
    pairs = np.zeros((cells, cells), np.int64)
    for i in range(draws):
        words = draw(seed, purpose, i, np.uint64(i % 7))
        before = 0
        for k in range(4):
            cell = int(unit(words[k]) * f32(cells))
            counts[k, cell] += 1
            if k:
                pairs[before, cell] += 1
            before = cell
    return counts, pairs


@pytest.mark.parametrize("purpose", PURPOSES)
def test_units_are_uniform_and_the_words_of_a_draw_independent(purpose):
    """Chi-square at fixed seeds; p below 1e-4 would fail."""
    from scipy.stats import chisquare

    counts, pairs = _count(np.uint64(42), purpose, 200_000, 64)
    for row in counts:
        assert chisquare(row).pvalue > 1e-4
    assert chisquare(pairs.ravel()).pvalue > 1e-4
