"""exp, log, sin, cos and tanh in float32, the same bits on the CPU and the GPU.

Libraries round these functions differently, so a trajectory computed with them would part ways
between devices. Here they are made of +, -, *, / and bit operations, each rounded once, and never
fused. Twin of include/maths.cuh.
"""

from lowgpu_kernels.device import f32, scalar, u32

INFINITY = f32(float("inf"))
NAN = f32(float("nan"))

# Adding this to |x| < 2^22 and taking it away again rounds x to the nearest integer, ties to even;
# the sum's low bits are then that integer in two's complement.
ROUNDER = f32(12582912.0)  # 1.5 * 2^23

# ln 2 and pi / 2 are cut into parts with few bits, so that an integer times a part is exact.
LOG2_E = f32(1.4426950408889634)
LN_2_HIGH = f32(0.693145751953125)
LN_2_LOW = f32(1.42860682030941723212e-6)
TWO_OVER_PI = f32(0.6366197723675814)
HALF_PI_HIGH = f32(1.5703125)
HALF_PI_MIDDLE = f32(4.835128784179687e-4)
HALF_PI_LOW = f32(3.139164786504813e-7)

EXP_LARGEST = f32(88.72283172607422)  # exp of the next float is infinite
EXP_SMALLEST = f32(-103.97207641601562)  # exp of the next float below rounds to zero
LARGEST_ANGLE = f32(1e4)


@scalar
def bits_of(x):
    """The 32 bits of a float32."""
    return f32(x).view(u32)


@scalar
def float_of(bits):
    """The float32 with these 32 bits."""
    return u32(bits).view(f32)


@scalar
def power_of_two(n):
    """2^n in float32, for n in [-126, 127] given as the low bits of a uint32."""
    return float_of(u32(u32(n + u32(127)) << u32(23)))


@scalar
def exp_f32(x):
    """e^x in float32, within 2 units in the last place (0.99 measured over 4e6 values).

    Infinite above 88.7228, 0 below -103.9721, denormal between there and -87.34; NaN stays NaN.

    Source: Cody & Waite 1980, reduction x = n ln 2 + r; Taylor series of e^r for |r| <= ln 2 / 2,
    whose first term left out is below 2^-27.
    """
    x = f32(x)
    if x != x:
        return x
    if x > EXP_LARGEST:
        return INFINITY
    if x < EXP_SMALLEST:
        return f32(0)
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    p = f32(1 / 5040)
    p = p * r + f32(1 / 720)
    p = p * r + f32(1 / 120)
    p = p * r + f32(1 / 24)
    p = p * r + f32(1 / 6)
    p = p * r + f32(1 / 2)
    y = f32(1) + (r + r * r * p)
    # n reaches -150 and 128, past what one power of two can hold: scale by two.
    count = u32(bits_of(shifted) - bits_of(ROUNDER))
    half = u32(u32(u32(count + u32(256)) >> u32(1)) - u32(128))
    return y * power_of_two(half) * power_of_two(u32(count - half))


@scalar
def log_f32(x):
    """The natural logarithm in float32, within 2 units in the last place (0.83 measured).

    -inf at 0 and -0, NaN below 0, inf at inf; NaN stays NaN. Denormals are taken as they are.

    Source: x = 2^n m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s) with s = (m - 1) / (m + 1),
    Taylor series whose first term left out is below 2^-28 of the result.
    """
    x = f32(x)
    if x != x or x == INFINITY:
        return x
    if x == f32(0):
        return -INFINITY
    if x < f32(0):
        return NAN
    n = f32(-127)
    if x < f32(1.1754943508222875e-38):
        x = x * f32(8388608)
        n = f32(-150)
    # The bits of sqrt(1/2) are taken away and put back, so that m starts there and not at 1.
    from_root = u32(bits_of(x) - u32(0x3F3504F3))
    bits = u32(from_root + u32(0x3F800000))
    n = n + f32(bits >> u32(23))
    m = float_of(u32(u32(from_root & u32(0x007FFFFF)) + u32(0x3F3504F3)))
    f = m - f32(1)
    s = f / (f + f32(2))
    z = s * s
    p = f32(2 / 9)
    p = p * z + f32(2 / 7)
    p = p * z + f32(2 / 5)
    p = p * z + f32(2 / 3)
    p = p * z
    # ln m = f - f^2 / 2 + s (f^2 / 2 + p): f is exact, so the leading term carries no rounding.
    half_square = f32(0.5) * f * f
    return n * LN_2_HIGH + (f - (half_square - (s * (half_square + p) + n * LN_2_LOW)))


@scalar
def _sin_series(r):
    z = r * r
    p = f32(1 / 362880)
    p = p * z - f32(1 / 5040)
    p = p * z + f32(1 / 120)
    p = p * z - f32(1 / 6)
    return r + r * (z * p)


@scalar
def _cos_series(r):
    z = r * r
    p = f32(-1 / 3628800)
    p = p * z + f32(1 / 40320)
    p = p * z - f32(1 / 720)
    p = p * z + f32(1 / 24)
    p = p * z - f32(1 / 2)
    return f32(1) + z * p


@scalar
def _sin_of_quadrants(x, ahead):
    """sin(x + ahead * pi / 2)."""
    x = f32(x)
    if not (-LARGEST_ANGLE <= x <= LARGEST_ANGLE):
        return NAN
    shifted = x * TWO_OVER_PI + ROUNDER
    n = shifted - ROUNDER
    r = ((x - n * HALF_PI_HIGH) - n * HALF_PI_MIDDLE) - n * HALF_PI_LOW
    quadrant = u32(bits_of(shifted) + u32(ahead))
    y = _cos_series(r) if quadrant & u32(1) else _sin_series(r)
    return -y if quadrant & u32(2) else y


@scalar
def sin_f32(x):
    """The sine of x radians in float32, within 2^-23 absolutely, for |x| <= 1e4.

    NaN outside, and for inf and NaN: an angle that large has lost its fraction, so wrap it before.

    Source: Cody & Waite 1980, reduction by pi / 2 in three parts; Taylor series to r^9 and r^10.
    """
    return _sin_of_quadrants(x, u32(0))


@scalar
def cos_f32(x):
    """The cosine of x radians in float32; error, range and source as for `sin_f32`."""
    return _sin_of_quadrants(x, u32(1))


@scalar
def tanh_f32(x):
    """The hyperbolic tangent in float32, within 2^-23 absolutely and 6 units in the last place.

    NaN stays NaN.

    Source: 1 - 2 / (e^2|x| + 1), and below 1/4 the Taylor series to x^9.
    """
    x = f32(x)
    size = -x if x < f32(0) else x
    if size < f32(0.25):
        z = x * x
        p = f32(62 / 2835)
        p = p * z - f32(17 / 315)
        p = p * z + f32(2 / 15)
        p = p * z - f32(1 / 3)
        return x + x * (z * p)
    y = f32(1) - f32(2) / (exp_f32(size + size) + f32(1))
    return -y if x < f32(0) else y
