"""The tree of priorities: its layout, and the scalar steps that use it. Twin of include/priority.cuh.

A leaf is the priority of one transition, in the order of the ring, zero where there is none. Above
them lie levels of sums, each of FAN entries of the level below, up to a level that a block of threads
holds whole. Leaves are multiples of UNIT, and sums count units in 64 bits: integers, which come out
the same in whatever order they are added, so that a changed leaf adds its difference to each level at
once, nothing is summed again, and nothing drifts.
"""

from lowgpu_kernels.device import f32, scalar, u32, u64
from lowgpu_kernels.device.maths import exp_f32, log_f32

FAN = 32  # entries a sum is of: 128 bytes of leaves, 256 of sums, which one thread reads at once
TOP = 1024  # most entries of the highest level. Untuned: 8 KB of shared memory.
UNIT = 2.0**-20
# Below 2^32 units, so that 2^31 leaves sum to less than 2^63.
LARGEST = 4096 - 2.0**-12
UNITS_PER_ONE, LARGEST_F32, UNIT_F32 = f32(2.0**20), f32(LARGEST), f32(UNIT)


def leaves_of(transitions):
    """Leaves for so many transitions: whole groups of FAN, at least one."""
    return max(1, -(-int(transitions) // FAN)) * FAN


def widths_of(leaves):
    """Entries of each level of sums, lowest first; all but the highest are whole groups of FAN."""
    widths, width = [], int(leaves) // FAN
    while width > TOP:
        widths.append(leaves_of(width))
        width = widths[-1] // FAN
    return (*widths, width)


def sums_of(leaves):
    """Entries of all levels of sums together."""
    return sum(widths_of(leaves))


@scalar
def units_of(priority):
    """A leaf in units: exact, since leaves are whole units below 2^32."""
    return u64(u32(priority * UNITS_PER_ONE))


@scalar
def whole_units(priority):
    """A positive priority as a leaf: rounded down to units, at least one; NaN is the largest."""
    if not priority < LARGEST_F32:
        return LARGEST_F32
    return max(f32(u32(priority * UNITS_PER_ONE)) * UNIT_F32, UNIT_F32)


@scalar
def priority_of(error, alpha, eps):
    """The leaf of a temporal-difference error: (|error| + eps)^alpha."""
    return whole_units(exp_f32(alpha * log_f32(abs(error) + eps)))


@scalar
def high_product(a, b):
    """The upper 64 bits of the product of two 64-bit numbers."""
    word, low = u64(32), u64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> word, a & low, b >> word, b & low
    middle = a_high * b_low + ((a_low * b_low) >> word)
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> word) + (other >> word)


@scalar
def target_of(row, high, low, stride, total):
    """Where row's draw falls in [0, total): within its own of the equal strata.

    Args:
        row: of the batch.
        high, low: two random words.
        stride: width of a stratum in 2^-64 of the total.
        total: units of all leaves.
    """
    word = (u64(u32(high)) << u64(32)) | u64(u32(low))
    return high_product(u64(row) * u64(stride) + high_product(word, u64(stride)), u64(total))


@scalar
def weight_of(drawn, least, beta):
    """The importance weight of a drawn leaf over the largest of its batch: (least / drawn)^beta."""
    return exp_f32(f32(beta) * log_f32(least / drawn))


def stride_of(batch):
    return u64((2**64 - 1) // int(batch))
